#include "ops/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "ops/compressor/cuda.h"
#include "ops/experts/cuda.h"
#include "ops/head/cuda.h"
#include "ops/hyper_connection/cuda.h"
#include "ops/indexer/cuda.h"
#include "ops/linear/cuda.h"
#include "ops/norm_rope_insert/cuda.h"
#include "ops/output_projection/cuda.h"
#include "ops/router/cuda.h"
#include "ops/sampling/cuda.h"
#include "ops/sparse_attention/cuda.h"

namespace fathom::ops {
namespace {

constexpr int64_t kStagingBytes = int64_t{4} << 20;  // a step's arrays; larger copies go in pieces

// The device's name and capability when the kernels run on it, else why not.
Expected<std::string> UsableDevice() {
  // Every kernel is loaded at the start, none in the middle of a capture or of a step.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (status != cudaSuccess || count == 0) {
    return Fail(Code::kUnavailable, "no CUDA device: {}",
                status == cudaSuccess ? "the driver lists none" : cudaGetErrorString(status));
  }
  cudaDeviceProp properties;
  FATHOM_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  if (properties.major != 9 || properties.minor != 0) {
    return Fail(Code::kUnavailable,
                "CUDA device {} has compute capability {}.{}; the kernels are built for 9.0",
                properties.name, properties.major, properties.minor);
  }
  return std::string(properties.name);
}

}  // namespace

bool CudaBackend::Available() {
  return UsableDevice().has_value();
}

Expected<std::unique_ptr<CudaBackend>> CudaBackend::Make(const CudaFusions& fusions) {
  FATHOM_ASSIGN([[maybe_unused]] const std::string name, UsableDevice());
  return std::unique_ptr<CudaBackend>(new CudaBackend(fusions));
}

CudaBackend::CudaBackend(const CudaFusions& fusions) : fusions_(fusions) {
  FATHOM_CUDA_CHECK(cudaSetDevice(0));
  for (Lane& lane : lanes_) {
    FATHOM_CUDA_CHECK(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking));
    FATHOM_CUDA_CHECK(cudaEventCreateWithFlags(&lane.event, cudaEventDisableTiming));
  }
  FATHOM_CUDA_CHECK(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming));
  FATHOM_CUDA_CHECK(cudaEventCreateWithFlags(&staged_, cudaEventDisableTiming));
  FATHOM_CUDA_CHECK(cudaMallocHost(&staging_, kStagingBytes));
  staging_bytes_ = kStagingBytes;
}

CudaBackend::~CudaBackend() {
  FATHOM_CUDA_CHECK(cudaStreamSynchronize(stream()));
  for (void* memory : memory_) FATHOM_CUDA_CHECK(cudaFree(memory));
  FATHOM_CUDA_CHECK(cudaFreeHost(staging_));
  FATHOM_CUDA_CHECK(cudaFreeHost(sampling_));
  FATHOM_CUDA_CHECK(cudaEventDestroy(staged_));
  FATHOM_CUDA_CHECK(cudaEventDestroy(fork_));
  for (Lane& lane : lanes_) {
    FATHOM_CUDA_CHECK(cudaFree(lane.scratch));
    FATHOM_CUDA_CHECK(cudaEventDestroy(lane.event));
    FATHOM_CUDA_CHECK(cudaStreamDestroy(lane.stream));
  }
}

CudaMemory CudaBackend::Memory() {
  size_t free = 0, total = 0;
  FATHOM_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

Expected<std::byte*> CudaBackend::Reserve(int64_t bytes, std::string_view what) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1))) != cudaSuccess) {
    (void)cudaGetLastError();
    const CudaMemory device = Memory();
    return Fail(Code::kResourceExhausted,
                "{}: cannot reserve {} bytes of device memory, {} of {} are free", what, bytes,
                device.free, device.total);
  }
  memory_.push_back(memory);
  return static_cast<std::byte*>(memory);
}

std::byte* CudaBackend::Allocate(int64_t bytes) {
  const Expected<std::byte*> memory = Reserve(bytes, "workspace");
  if (!memory) throw std::bad_alloc();  // as HostBackend
  Fill(*memory, 0, bytes);
  return *memory;
}

void CudaBackend::PlanScratch(const std::function<void()>& run) {
  planning_ = true;
  run();
  planning_ = false;
}

void* CudaBackend::Scratch(int64_t bytes) {
  Lane& lane = lanes_[lane_];
  if (bytes <= lane.scratch_bytes) return lane.scratch;
  // A captured graph may hold the old address: it stays until the backend goes.
  if (lane.scratch != nullptr) memory_.push_back(lane.scratch);
  FATHOM_CUDA_CHECK(cudaMalloc(&lane.scratch, static_cast<size_t>(bytes)));
  lane.scratch_bytes = bytes;
  return lane.scratch;
}

int64_t CudaBackend::scratch_bytes() const {
  int64_t bytes = 0;
  for (const Lane& lane : lanes_) bytes += lane.scratch_bytes;
  return bytes;
}

void CudaBackend::Branch(int lane) {
  FATHOM_CHECK(lane >= 0 && lane < kLanes);
  if (!planning_) {
    if (!branched_) FATHOM_CUDA_CHECK(cudaEventRecord(fork_, lanes_[0].stream));
    if (lane != 0 && !lanes_[lane].active) {
      FATHOM_CUDA_CHECK(cudaStreamWaitEvent(lanes_[lane].stream, fork_));
      lanes_[lane].active = true;
    }
  }
  branched_ = true;
  lane_ = lane;
}

void CudaBackend::Await(int other) {
  FATHOM_CHECK(branched_ && other >= 0 && other < kLanes && other != lane_);
  if (planning_) return;
  FATHOM_CUDA_CHECK(cudaEventRecord(lanes_[other].event, lanes_[other].stream));
  FATHOM_CUDA_CHECK(cudaStreamWaitEvent(stream(), lanes_[other].event));
}

void CudaBackend::Join() {
  lane_ = 0;
  branched_ = false;
  for (Lane& lane : lanes_) {
    if (!lane.active) continue;
    FATHOM_CUDA_CHECK(cudaEventRecord(lane.event, lane.stream));
    FATHOM_CUDA_CHECK(cudaStreamWaitEvent(stream(), lane.event));
    lane.active = false;
  }
}

void CudaBackend::ToHost(void* host, const void* data, int64_t bytes) {
  FATHOM_CUDA_CHECK(
      cudaMemcpyAsync(host, data, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream()));
  FATHOM_CUDA_CHECK(cudaStreamSynchronize(stream()));
}

void CudaBackend::FromHost(void* data, const void* host, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += staging_bytes_) {
    const auto size = static_cast<size_t>(std::min(staging_bytes_, bytes - at));
    FATHOM_CUDA_CHECK(cudaEventSynchronize(staged_));  // the copy before has left the staging
    std::memcpy(staging_, static_cast<const std::byte*>(host) + at, size);
    FATHOM_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(data) + at, staging_, size,
                                      cudaMemcpyHostToDevice, stream()));
    FATHOM_CUDA_CHECK(cudaEventRecord(staged_, stream()));
  }
}

void CudaBackend::Copy(void* to, const void* from, int64_t bytes) {
  FATHOM_CUDA_CHECK(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()));
}

void CudaBackend::Fill(void* data, uint8_t value, int64_t bytes) {
  FATHOM_CUDA_CHECK(cudaMemsetAsync(data, value, static_cast<size_t>(bytes), stream()));
}

void CudaBackend::Wait() {
  FATHOM_CUDA_CHECK(cudaStreamSynchronize(stream()));
}

const void* CudaBackend::Find(const void* host) const {
  if (host == nullptr) return nullptr;
  const auto at = device_of_.find(host);
  FATHOM_CHECK(at != device_of_.end());  // a weight that UploadForCuda does not know
  return at->second;
}

HyperConnectionSite CudaBackend::At(const HyperConnectionSite& site) const {
  return {At(site.fn), At(site.base), At(site.scale), site.mixes};
}

void CudaBackend::BeginStep(const StepView& step) {
  ThreadLaunchPolicy().one_split = fusions_.one_split && step.num_tokens <= kOneSplitTokens;
}

void CudaBackend::RopeTables(const StepView& step, const RopeFrequencies& rope, float* table) {
  if (planning_) return;
  RopeTablesCuda(step, rope, table, stream());
}

void CudaBackend::Embed(const EmbedArgs& host) {
  if (planning_) return;
  EmbedArgs args = host;
  args.table = At(args.table);
  EmbedCuda(args, stream());
}

void CudaBackend::Linear(const LinearArgs& args) {
  void* scratch = Scratch(LinearCudaScratchBytes(args.x.rows, args.weight->in));
  if (planning_) return;
  LinearCuda(args, scratch, stream());
}

bool CudaBackend::TakesTogether(std::span<const LinearArgs> products) const {
  return fusions_.products && LinearsCudaTake(products);
}

void CudaBackend::LinearTogether(std::span<const LinearArgs> products) {
  if (!planning_) LinearsCuda(products, stream());
}

void CudaBackend::RmsNorm(const RmsNormArgs& host) {
  if (planning_) return;
  RmsNormArgs args = host;
  args.weight = At(args.weight);
  RmsNormCuda(args, stream());
}

// Every sequence of a step has a token; here none has two.
bool CudaBackend::InsertCommits(const StepView& step) const {
  return fusions_.commit && step.num_tokens == step.num_sequences;
}

void CudaBackend::NormRopeInsert(const NormRopeInsertArgs& host) {
  if (planning_) return;
  NormRopeInsertArgs args = host;
  args.kv_norm = At(args.kv_norm);
  NormRopeInsertCuda(args, stream());
}

void CudaBackend::WindowCommit(const WindowCommitArgs& args) {
  if (planning_) return;
  WindowCommitCuda(args, stream());
}

void CudaBackend::Compressor(const CompressorArgs& host) {
  if (planning_) return;
  CompressorArgs args = host;
  args.ape = At(args.ape);
  args.norm = At(args.norm);
  CompressorCuda(args, stream());
}

void CudaBackend::Indexer(const IndexerArgs& args) {
  void* scratch = Scratch(IndexerCudaScratchBytes(args.step->num_tokens));
  if (planning_) return;
  IndexerCuda(args, scratch, stream(), fusions_.one_token);
}

void CudaBackend::SparseAttention(const SparseAttentionArgs& host) {
  void* scratch = Scratch(kSparseAttentionCudaScratchBytes);
  if (planning_) return;
  SparseAttentionArgs args = host;
  args.sink = At(args.sink);
  SparseAttentionCuda(args, scratch, stream());
}

void CudaBackend::OutputProjection(const OutputProjectionArgs& args) {
  void* scratch = Scratch(OutputProjectionCudaScratchBytes(args, args.o.rows));
  if (planning_) return;
  OutputProjectionCuda(args, scratch, stream());
}

void CudaBackend::HyperConnection(const HyperConnectionArgs& host) {
  if (planning_) return;
  HyperConnectionArgs args = host;
  const HyperConnectionSite site = args.site == nullptr ? HyperConnectionSite{} : At(*args.site);
  if (args.site != nullptr) args.site = &site;
  args.norm = At(args.norm);
  HyperConnectionCuda(args, stream());
}

void CudaBackend::Router(const RouterArgs& host) {
  if (planning_) return;
  RouterArgs args = host;
  args.bias = At(args.bias);
  args.tid2eid = At(args.tid2eid);
  RouterCuda(args, stream());
}

void CudaBackend::GateAndRoute(const LinearArgs& gate, const RouterArgs& host) {
  RouterArgs route = host;
  route.bias = At(route.bias);
  route.tid2eid = At(route.tid2eid);
  if (!fusions_.gate || !GateAndRouteCudaTakes(gate, route)) {
    Linear(gate);
    return Router(host);
  }
  if (planning_) return;
  GateAndRouteCuda(gate, route, stream());
}

void CudaBackend::Experts(const ExpertsArgs& args) {
  void* scratch = Scratch(ExpertsCudaScratchBytes(args, args.z.rows));
  if (planning_) return;
  ExpertsCuda(args, scratch, stream());
}

void CudaBackend::Head(const HeadArgs& host) {
  HeadArgs args = host;
  const HyperConnectionSite site = At(*args.site);
  args.site = &site;
  args.norm = At(args.norm);
  if (!planning_) HeadCollapseCuda(args, stream());
  // The head is a bf16 weight: no input quantisation, float32 logits.
  Linear({.x = TopRows(args.z, args.num_rows),
          .weight = args.weight,
          .y = TopRows(args.logits, args.num_rows),
          .numerics = args.numerics,
          .round_output = false});
}

void CudaBackend::Sample(const SampleBatchArgs& args) {
  const int64_t vocabulary = args.logits.cols, rows = args.logits.rows;
  if (!SamplesOnCuda(vocabulary)) {
    if (planning_) return;
    std::vector<float> logits(static_cast<size_t>(rows * vocabulary));
    for (int64_t r = 0; r < rows; ++r) {
      ToHost(logits.data() + r * vocabulary,
             static_cast<const float*>(args.logits.data) + r * args.logits.stride,
             vocabulary * static_cast<int64_t>(sizeof(float)));
    }
    SampleBatchReference({F32Matrix(logits.data(), rows, vocabulary), args.rows, args.out});
    return;
  }
  const int64_t bytes = SampleCudaScratchBytes(rows, vocabulary);
  void* const scratch = Scratch(bytes);
  if (bytes > sampling_bytes_) {
    FATHOM_CUDA_CHECK(cudaFreeHost(sampling_));
    FATHOM_CUDA_CHECK(cudaMallocHost(&sampling_, static_cast<size_t>(bytes)));
    sampling_bytes_ = bytes;
  }
  if (planning_ || args.rows.empty()) return;
  SampleBatchCuda(args, rows, scratch, sampling_, stream());
}

}  // namespace fathom::ops
