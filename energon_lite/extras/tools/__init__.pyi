from .image_text_packing import ImageTextRow as ImageTextRow
from .image_text_packing import ImageTextTaskEncoder as ImageTextTaskEncoder
from .packed_list import PackedList as PackedList
