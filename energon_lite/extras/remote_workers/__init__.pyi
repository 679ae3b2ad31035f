from energon_lite.extras.remote_workers.described import RayWorkers as RayWorkers
from energon_lite.extras.remote_workers.described import TcpWorkers as TcpWorkers
from energon_lite.extras.remote_workers.described import TlsFiles as TlsFiles
from energon_lite.extras.remote_workers.server import JobServer as JobServer

__all__ = ["JobServer", "RayWorkers", "TcpWorkers", "TlsFiles"]
