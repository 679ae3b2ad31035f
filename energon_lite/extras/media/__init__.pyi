import energon_lite.entry_points

from .av_decoder import AVDecoder as AVDecoder
from .av_decoder import AVWebdatasetDecoder as AVWebdatasetDecoder
from .batch_images import BatchImageDecoder as BatchImageDecoder
from .batch_images import EncodedImages as EncodedImages
from .container import AVData as AVData
from .file_cache_pool import FileStoreCachePool as FileStoreCachePool
from .kept_lazy import FileCacheLazy as FileCacheLazy
from .media_scan import MediaFilterConfig as MediaFilterConfig
from .media_scan import MediaFilterStrategy as MediaFilterStrategy
from .metadata import AVMetadata as AVMetadata
from .metadata import ImageMetadata as ImageMetadata
from .metadata import MediaMetadataBase as MediaMetadataBase
from .metadata import MediaMetadataType as MediaMetadataType
from .metadata import deserialize_media_metadata as deserialize_media_metadata
from .metadata import serialize_media_metadata as serialize_media_metadata
from .system_store import ByteRangeStore as ByteRangeStore
from .system_store import SystemFileStore as SystemFileStore
from .uniform_clips import get_clips_uniform as get_clips_uniform
from .uniform_clips import get_single_frames_uniform as get_single_frames_uniform
from .webdataset_store import JsonlFileStore as JsonlFileStore
from .webdataset_store import WebdatasetFileStore as WebdatasetFileStore

DECODERS: dict[str, energon_lite.entry_points.Decoder]
