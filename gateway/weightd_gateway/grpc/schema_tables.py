"""The messages and services of gRPC that are spoken here, as data: what a `.proto` file says, and nothing else.

A field is ``NUMBER NAME TYPE``. ``TYPE*`` is repeated, ``{TYPE}`` a map from text, and ``TYPE@CHOICE`` one of those of
which at most one is there. A method is ``REQUEST ANSWER``, where ``*`` tells of a stream. A test compares numbers,
names and types with those that a client of others was generated from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DescriptorFile:
    """One file of descriptors.

    Attributes:
        file: its name, by which reflection knows it.
        package: what stands before the names of messages and services.
        messages: the fields of each; "A.B" is within "A", which stands before it.
        enums: the names of each, that of 0 first.
        services: the methods of each.
    """

    file: str
    package: str
    messages: Mapping[str, str]
    enums: Mapping[str, str] = field(default_factory=dict[str, str])
    services: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])


_TENSOR = "1 name string, 2 datatype string, 3 shape int64*"
_NAMED_MODEL = "1 name string, 2 version string"
_PARAMETERS = "parameters {InferParameter}"
_CHOICE = (
    "1 bool_param bool@parameter_choice, 2 int64_param int64@parameter_choice, 3 string_param string@parameter_choice"
)
_LOAD_REQUEST = "1 repository_name string, 2 model_name string, 3 parameters {ModelRepositoryParameter}"
_LOG_SETTING = (
    "1 bool_param bool@parameter_choice, 2 uint32_param uint32@parameter_choice, 3 string_param string@parameter_choice"
)
_BATCH_TIMES = (
    "2 compute_input StatisticDuration, 3 compute_infer StatisticDuration, 4 compute_output StatisticDuration"
)

# The Open Inference Protocol with Triton's additions, of whose description of a model what weightd says of one.
INFERENCE = DescriptorFile(
    file="weightd/inference.proto",
    package="inference",
    enums={
        "DataType": "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 "
        "TYPE_INT32 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16",
    },
    messages={
        "ServerLiveRequest": "",
        "ServerLiveResponse": "1 live bool",
        "ServerReadyRequest": "",
        "ServerReadyResponse": "1 ready bool",
        "ModelReadyRequest": _NAMED_MODEL,
        "ModelReadyResponse": "1 ready bool",
        "ServerMetadataRequest": "",
        "ServerMetadataResponse": "1 name string, 2 version string, 3 extensions string*",
        "ModelMetadataRequest": _NAMED_MODEL,
        "ModelMetadataResponse": "1 name string, 2 versions string*, 3 platform string, "
        "4 inputs ModelMetadataResponse.TensorMetadata*, 5 outputs ModelMetadataResponse.TensorMetadata*",
        "ModelMetadataResponse.TensorMetadata": _TENSOR,
        # Inference.
        "InferParameter": f"{_CHOICE}, 4 double_param double@parameter_choice, 5 uint64_param uint64@parameter_choice",
        "InferTensorContents": "1 bool_contents bool*, 2 int_contents int32*, 3 int64_contents int64*, "
        "4 uint_contents uint32*, 5 uint64_contents uint64*, 6 fp32_contents float*, 7 fp64_contents double*, "
        "8 bytes_contents bytes*",
        "ModelInferRequest": f"1 model_name string, 2 model_version string, 3 id string, 4 {_PARAMETERS}, "
        "5 inputs ModelInferRequest.InferInputTensor*, 6 outputs ModelInferRequest.InferRequestedOutputTensor*, "
        "7 raw_input_contents bytes*",
        "ModelInferRequest.InferInputTensor": f"{_TENSOR}, 4 {_PARAMETERS}, 5 contents InferTensorContents",
        "ModelInferRequest.InferRequestedOutputTensor": f"1 name string, 2 {_PARAMETERS}",
        "ModelInferResponse": f"1 model_name string, 2 model_version string, 3 id string, 4 {_PARAMETERS}, "
        "5 outputs ModelInferResponse.InferOutputTensor*, 6 raw_output_contents bytes*",
        "ModelInferResponse.InferOutputTensor": f"{_TENSOR}, 4 {_PARAMETERS}, 5 contents InferTensorContents",
        "ModelStreamInferResponse": "1 error_message string, 2 infer_response ModelInferResponse",
        # What a model is.
        "ModelConfigRequest": _NAMED_MODEL,
        "ModelConfigResponse": "1 config ModelConfig",
        "ModelConfig": "1 name string, 2 platform string, 3 version_policy ModelVersionPolicy, 4 max_batch_size int32, "
        "5 input ModelInput*, "
        "6 output ModelOutput*, 11 dynamic_batching ModelDynamicBatching@scheduling_choice, "
        "13 sequence_batching ModelSequenceBatching@scheduling_choice, "
        "15 ensemble_scheduling ModelEnsembling@scheduling_choice, 14 parameters {ModelParameter}, 17 backend string, "
        "19 model_transaction_policy ModelTransactionPolicy",
        "ModelInput": "1 name string, 2 data_type DataType, 4 dims int64*, 8 optional bool",
        "ModelOutput": "1 name string, 2 data_type DataType, 3 dims int64*",
        "ModelVersionPolicy": "1 latest ModelVersionPolicy.Latest@policy_choice",
        "ModelVersionPolicy.Latest": "1 num_versions uint32",
        "ModelDynamicBatching": "1 preferred_batch_size int32*, 2 max_queue_delay_microseconds uint64, "
        "4 priority_levels uint64, 5 default_priority_level uint64",
        "ModelSequenceBatching": "",
        "ModelEnsembling": "",
        "ModelParameter": "1 string_value string",
        "ModelTransactionPolicy": "1 decoupled bool",
        # What it has done.
        "ModelStatisticsRequest": _NAMED_MODEL,
        "ModelStatisticsResponse": "1 model_stats ModelStatistics*",
        "StatisticDuration": "1 count uint64, 2 ns uint64",
        "InferStatistics": "1 success StatisticDuration, 2 fail StatisticDuration, 3 queue StatisticDuration, "
        "4 compute_input StatisticDuration, 5 compute_infer StatisticDuration, 6 compute_output StatisticDuration, "
        "7 cache_hit StatisticDuration, 8 cache_miss StatisticDuration",
        "InferBatchStatistics": f"1 batch_size uint64, {_BATCH_TIMES}",
        "InferResponseStatistics": "1 compute_infer StatisticDuration, 2 compute_output StatisticDuration, "
        "3 success StatisticDuration, 4 fail StatisticDuration, 5 empty_response StatisticDuration, "
        "6 cancel StatisticDuration",
        "MemoryUsage": "1 type string, 2 id int64, 3 byte_size uint64",
        "ModelStatistics": "1 name string, 2 version string, 3 last_inference uint64, 4 inference_count uint64, "
        "5 execution_count uint64, 6 inference_stats InferStatistics, 7 batch_stats InferBatchStatistics*, "
        "8 memory_usage MemoryUsage*, 9 response_stats {InferResponseStatistics}",
        # Which models there are.
        "ModelRepositoryParameter": f"{_CHOICE}, 4 bytes_param bytes@parameter_choice",
        "RepositoryIndexRequest": "1 repository_name string, 2 ready bool",
        "RepositoryIndexResponse": "1 models RepositoryIndexResponse.ModelIndex*",
        "RepositoryIndexResponse.ModelIndex": "1 name string, 2 version string, 3 state string, 4 reason string",
        "RepositoryModelLoadRequest": _LOAD_REQUEST,
        "RepositoryModelLoadResponse": "",
        "RepositoryModelUnloadRequest": _LOAD_REQUEST,
        "RepositoryModelUnloadResponse": "",
        # Tensors in shared memory.
        "SystemSharedMemoryStatusRequest": "1 name string",
        "SystemSharedMemoryStatusResponse": "1 regions {SystemSharedMemoryStatusResponse.RegionStatus}",
        "SystemSharedMemoryStatusResponse.RegionStatus": "1 name string, 2 key string, 3 offset uint64, "
        "4 byte_size uint64",
        "SystemSharedMemoryRegisterRequest": "1 name string, 2 key string, 3 offset uint64, 4 byte_size uint64",
        "SystemSharedMemoryRegisterResponse": "",
        "SystemSharedMemoryUnregisterRequest": "1 name string",
        "SystemSharedMemoryUnregisterResponse": "",
        "CudaSharedMemoryStatusRequest": "1 name string",
        "CudaSharedMemoryStatusResponse": "1 regions {CudaSharedMemoryStatusResponse.RegionStatus}",
        "CudaSharedMemoryStatusResponse.RegionStatus": "1 name string, 2 device_id uint64, 3 byte_size uint64",
        "CudaSharedMemoryRegisterRequest": "1 name string, 2 raw_handle bytes, 3 device_id int64, 4 byte_size uint64",
        "CudaSharedMemoryRegisterResponse": "",
        "CudaSharedMemoryUnregisterRequest": "1 name string",
        "CudaSharedMemoryUnregisterResponse": "",
        # Settings of the server.
        "TraceSettingRequest": "1 settings {TraceSettingRequest.SettingValue}, 2 model_name string",
        "TraceSettingRequest.SettingValue": "1 value string*",
        "TraceSettingResponse": "1 settings {TraceSettingResponse.SettingValue}",
        "TraceSettingResponse.SettingValue": "1 value string*",
        "LogSettingsRequest": "1 settings {LogSettingsRequest.SettingValue}",
        "LogSettingsRequest.SettingValue": _LOG_SETTING,
        "LogSettingsResponse": "1 settings {LogSettingsResponse.SettingValue}",
        "LogSettingsResponse.SettingValue": _LOG_SETTING,
    },
    services={
        "GRPCInferenceService": {
            "ServerLive": "ServerLiveRequest ServerLiveResponse",
            "ServerReady": "ServerReadyRequest ServerReadyResponse",
            "ModelReady": "ModelReadyRequest ModelReadyResponse",
            "ServerMetadata": "ServerMetadataRequest ServerMetadataResponse",
            "ModelMetadata": "ModelMetadataRequest ModelMetadataResponse",
            "ModelInfer": "ModelInferRequest ModelInferResponse",
            "ModelStreamInfer": "ModelInferRequest* ModelStreamInferResponse*",
            "ModelConfig": "ModelConfigRequest ModelConfigResponse",
            "ModelStatistics": "ModelStatisticsRequest ModelStatisticsResponse",
            "RepositoryIndex": "RepositoryIndexRequest RepositoryIndexResponse",
            "RepositoryModelLoad": "RepositoryModelLoadRequest RepositoryModelLoadResponse",
            "RepositoryModelUnload": "RepositoryModelUnloadRequest RepositoryModelUnloadResponse",
            "SystemSharedMemoryStatus": "SystemSharedMemoryStatusRequest SystemSharedMemoryStatusResponse",
            "SystemSharedMemoryRegister": "SystemSharedMemoryRegisterRequest SystemSharedMemoryRegisterResponse",
            "SystemSharedMemoryUnregister": "SystemSharedMemoryUnregisterRequest SystemSharedMemoryUnregisterResponse",
            "CudaSharedMemoryStatus": "CudaSharedMemoryStatusRequest CudaSharedMemoryStatusResponse",
            "CudaSharedMemoryRegister": "CudaSharedMemoryRegisterRequest CudaSharedMemoryRegisterResponse",
            "CudaSharedMemoryUnregister": "CudaSharedMemoryUnregisterRequest CudaSharedMemoryUnregisterResponse",
            "TraceSetting": "TraceSettingRequest TraceSettingResponse",
            "LogSettings": "LogSettingsRequest LogSettingsResponse",
        }
    },
)

# The health protocol of gRPC, which Kubernetes and load balancers ask.
HEALTH = DescriptorFile(
    file="weightd/health.proto",
    package="grpc.health.v1",
    messages={
        "HealthCheckRequest": "1 service string",
        "HealthCheckResponse": "1 status HealthCheckResponse.ServingStatus",
    },
    enums={"HealthCheckResponse.ServingStatus": "UNKNOWN SERVING NOT_SERVING SERVICE_UNKNOWN"},
    services={
        "Health": {
            "Check": "HealthCheckRequest HealthCheckResponse",
            "Watch": "HealthCheckRequest HealthCheckResponse*",
        }
    },
)


def _reflection_file(version: str) -> DescriptorFile:
    return DescriptorFile(
        file=f"weightd/reflection_{version}.proto",
        package=f"grpc.reflection.{version}",
        messages={
            "ServerReflectionRequest": "1 host string, 3 file_by_filename string@message_request, "
            "4 file_containing_symbol string@message_request, "
            "5 file_containing_extension ExtensionRequest@message_request, "
            "6 all_extension_numbers_of_type string@message_request, 7 list_services string@message_request",
            "ExtensionRequest": "1 containing_type string, 2 extension_number int32",
            "ServerReflectionResponse": "1 valid_host string, 2 original_request ServerReflectionRequest, "
            "4 file_descriptor_response FileDescriptorResponse@message_response, "
            "5 all_extension_numbers_response ExtensionNumberResponse@message_response, "
            "6 list_services_response ListServiceResponse@message_response, "
            "7 error_response ErrorResponse@message_response",
            "FileDescriptorResponse": "1 file_descriptor_proto bytes*",
            "ExtensionNumberResponse": "1 base_type_name string, 2 extension_number int32*",
            "ListServiceResponse": "1 service ServiceResponse*",
            "ServiceResponse": "1 name string",
            "ErrorResponse": "1 error_code int32, 2 error_message string",
        },
        services={
            "ServerReflection": {"ServerReflectionInfo": "ServerReflectionRequest* ServerReflectionResponse*"},
        },
    )


# By which grpcurl and others find out what there is. Those who know the older one alone are many.
REFLECTION = _reflection_file("v1")
REFLECTION_V1ALPHA = _reflection_file("v1alpha")

# What `grpc-status-details-bin` has: an error, and after which time to ask again.
STATUS = DescriptorFile(
    file="weightd/status.proto",
    package="google.rpc",
    messages={
        "Any": "1 type_url string, 2 value bytes",
        "Duration": "1 seconds int64, 2 nanos int32",
        "RetryInfo": "1 retry_delay Duration",
        "Status": "1 code int32, 2 message string, 3 details Any*",
    },
)
