"""Simulator of MindSpore Lite 2.7.0 on Ascend cards, with the pitfalls of the vendor's library.

A test makes a `Host` with simulated cards in a private directory and starts real processes with the variables of
`environment`, where `import mindspore_lite` and `ctypes.CDLL("libascendcl.so")` load the simulator. The memory of the
cards is files that the processes map, so a weight that one process overwrites changes the answers of all::

    host = Host(tmp_path / "host", cards=2)
    path = models.mlp(tmp_path / "mlp.mindir")
    subprocess.Popen([...], env={**os.environ, **environment(host)})
    host.fault("build", "crash", who="importer", skip=1, times=1)       # the second attach crashes
    assert host.copies_of_weights(0) == 1

`ranks` writes models that are split over cards, and their rank tables. Models of one process share memory through a
`ModelGroup`. The switch `hccl_second` sets the duration of HCCL's timeouts.

The behaviour follows the source and documents of the vendor's library and driver, not tests on a card. Docstrings name
the source: "model_process.cc:681" is MindSpore Lite 2.7.0, "v2" the driver of Ascend 910B and 910C, "v3" the driver of
Ascend 950, "docs" the vendor's ACL documents.
"""

from ascendsim.host import Host, environment
from ascendsim.switches import Fault, Switches

__all__ = ["Fault", "Host", "Switches", "environment"]
