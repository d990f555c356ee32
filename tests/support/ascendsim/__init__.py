"""A simulator of MindSpore Lite 2.7.0 on Ascend cards, as hard on its user as the vendor's library.

A test makes a `Host` with simulated cards in a directory of its own and starts real processes with the variables of
`environment`: there `import mindspore_lite` and `ctypes.CDLL("libascendcl.so")` are the simulator's. The memory of
the cards is files that the processes map, so a weight that one process overwrites changes everybody's answers::

    host = Host(tmp_path / "host", cards=2)
    path = models.mlp(tmp_path / "mlp.mindir")
    subprocess.Popen([...], env={**os.environ, **environment(host)})
    host.fault("build", "crash", who="importer", skip=1, times=1)       # the second attach crashes
    assert host.copies_of_weights(0) == 1

Models that are cut over cards, and the tables for them, are written by `ranks`; what a process shares with itself is
a `ModelGroup`. HCCL's time-outs last as long as the switch `hccl_second` says.

What it knows of the vendor's library and driver comes from their source and documents, not from a card. Docstrings
name the place: "model_process.cc:681" is MindSpore Lite 2.7.0, "v2" the driver of Ascend 910B and 910C, "v3" that of
Ascend 950, "docs" the vendor's ACL documents.
"""

from ascendsim.host import Host, environment
from ascendsim.switches import Fault, Switches

__all__ = ["Fault", "Host", "Switches", "environment"]
