from .index.filter_index import build_filter_index as build_filter_index
from .index.filter_index import build_filter_index_from_shard_indexes as build_filter_index_from_shard_indexes
from .read.range_cache import ReadAhead as ReadAhead
from .read.range_stream import RangeStream as RangeStream
from .read.range_stream import open_stream as open_stream
from .read.source import Source as Source
from .read.source import register_source as register_source
from .samples.decoding import SampleDecoder as SampleDecoder
