"""`deep_ep`, where the parent directory of this package is on the module path, as `python -m hybrid_ep.run` puts it
into PYTHONPATH for the processes that a program starts: becomes `hybrid_ep.deep_ep` as soon as it is imported."""

from hybrid_ep.install import install_as_deep_ep

install_as_deep_ep()
