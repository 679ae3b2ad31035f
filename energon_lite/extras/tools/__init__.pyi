from .image_text_packing import ImageTextRow as ImageTextRow
from .image_text_packing import ImageTextTaskEncoder as ImageTextTaskEncoder
from .packed_list import PackedList as PackedList
from .positions import context_parallel_positions as context_parallel_positions
from .positions import context_parallel_slice as context_parallel_slice
from .positions import mrope_positions as mrope_positions
