// Weights on their way to the device.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ops/linear/cuda_expand.cuh"

namespace fathom::ops {
namespace {

struct Layout {
  int64_t host_row = 0;    // bytes of a row in the checkpoint
  int64_t device_row = 0;  // of the padded row
  int64_t scale_rows = 0;
  int64_t host_scale_row = 0;
  int64_t device_scale_row = 0;

  int64_t ScaleOffset(int64_t out) const { return (out * device_row + 255) / 256 * 256; }
  int64_t Bytes(int64_t out) const {
    return ScaleOffset(out) + (scale_rows * device_scale_row + 255) / 256 * 256;
  }
};

Layout LayoutOf(const LinearWeight& w) {
  const int64_t depth = CudaDepth(w.in);
  switch (w.format) {
    case WeightFormat::kF32: return {w.in * 4, depth * 4, 0, 0, 0};
    case WeightFormat::kBF16: return {w.in * 2, depth * 2, 0, 0, 0};
    case WeightFormat::kFp8Block128:
      return {w.in, depth, (w.out + 127) / 128, depth / 128, depth / 128};
    case WeightFormat::kFp4Block32: return {w.in / 2, depth / 2, w.out, w.in / 32, depth / 32};
  }
  return {};
}

// [rows, host_row] to [rows, device_row], zeros in between.
void CopyRows(uint8_t* device, int64_t device_row, const void* host, int64_t host_row,
              int64_t rows) {
  if (rows == 0) return;
  if (device_row == host_row) {
    FATHOM_CUDA_CHECK(
        cudaMemcpy(device, host, static_cast<size_t>(rows * host_row), cudaMemcpyHostToDevice));
    return;
  }
  FATHOM_CUDA_CHECK(cudaMemset(device, 0, static_cast<size_t>(rows * device_row)));
  FATHOM_CUDA_CHECK(cudaMemcpy2D(device, static_cast<size_t>(device_row), host,
                                 static_cast<size_t>(host_row), static_cast<size_t>(host_row),
                                 static_cast<size_t>(rows), cudaMemcpyHostToDevice));
}

// In place, from the checkpoint's order of FP4 codes to the device's.
__global__ void __launch_bounds__(256) Fp4WordsKernel(uint32_t* words, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * 256) {
    words[i] = ToFp4Word(words[i]);
  }
}

}  // namespace

CudaWeight::~CudaWeight() {
  for (void* memory : owned) {
    if (memory != nullptr) (void)cudaFree(memory);
  }
}

int64_t CudaWeightBytes(const LinearWeight& weight) {
  return LayoutOf(weight).Bytes(weight.out);
}

void PackLinearCuda(LinearWeight& weight, const CudaAllocate& allocate) {
  const Layout layout = LayoutOf(weight);
  auto packed = std::make_shared<CudaWeight>();
  const int64_t bytes = layout.Bytes(weight.out);
  void* memory = nullptr;
  if (allocate) {
    memory = allocate(bytes);
  } else {
    FATHOM_CUDA_CHECK(cudaMalloc(&memory, static_cast<size_t>(bytes)));
    packed->owned[0] = memory;
  }
  auto* data = static_cast<uint8_t*>(memory);
  uint8_t* scale = data + layout.ScaleOffset(weight.out);
  CopyRows(data, layout.device_row, weight.data, layout.host_row, weight.out);
  CopyRows(scale, layout.device_scale_row, weight.scale, layout.host_scale_row, layout.scale_rows);
  if (weight.format == WeightFormat::kFp4Block32) {
    const int64_t words = weight.out * layout.device_row / 4;
    Fp4WordsKernel<<<1024, 256>>>(reinterpret_cast<uint32_t*>(data), words);
    FATHOM_CUDA_CHECK(cudaGetLastError());
  }

  // A copy from pageable memory may return before it arrives, and steps run on other streams.
  FATHOM_CUDA_CHECK(cudaStreamSynchronize(nullptr));

  CudaWeightView& view = packed->view;
  view.data = data;
  view.scale = layout.scale_rows == 0 ? nullptr : scale;
  view.out = static_cast<int32_t>(weight.out);
  view.in = static_cast<int32_t>(weight.in);
  view.depth = static_cast<int32_t>(CudaDepth(weight.in));
  view.format = weight.format;
  // MakeScale: the first factor ends at field 254 = byte + bias.
  const int largest = weight.format == WeightFormat::kFp4Block32 ? 254 - 126 : 254 - 120;
  for (int64_t i = 0; i < layout.scale_rows * layout.host_scale_row; ++i) {
    view.wide |= weight.scale[i] > largest;
  }
  weight.packed = std::move(packed);
}

const CudaWeight& PackedCuda(const LinearWeight& weight) {
  const auto* packed = dynamic_cast<const CudaWeight*>(weight.packed.get());
  if (packed == nullptr) {
    std::fprintf(stderr, "fathom: a weight was not packed for CUDA\n");
    std::abort();
  }
  return *packed;
}

}  // namespace fathom::ops
