"""HCCL beneath the graph engine: rank tables, and a world of processes that compute together.

Places: "hccl" is the user guide of hicann/hccl, "hcomm" the code of libochao-huawei/hcomm 8958adb below
src/legacy/ascend910/, "ge" hicann/ge ffdcbc9. Time-outs are those of the documents in seconds, of which each lasts
`Switches.hccl_second`.
"""
