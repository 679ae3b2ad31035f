from .sample_store import SampleStore as SampleStore
