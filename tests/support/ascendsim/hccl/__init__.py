"""HCCL below the graph engine: rank tables, and a world of processes that compute together.

Sources: "hccl" is the user guide of hicann/hccl, "hcomm" the code of libochao-huawei/hcomm 8958adb below
src/legacy/ascend910/, "ge" hicann/ge ffdcbc9. Timeouts have the documented number of seconds, each of which lasts
`Switches.hccl_second`.
"""
