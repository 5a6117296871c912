"""A stand-in for `deep_ep` that becomes `hybrid_ep.deep_ep` when it is imported.

`python -m hybrid_ep.run` puts the parent directory of this package into PYTHONPATH, so that processes which the program
starts find it.
"""

from hybrid_ep.install import install_as_deep_ep

install_as_deep_ep()
