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
  int64_t rows = 0;        // padded
  int64_t host_scale_rows = 0, scale_rows = 0;
  int64_t scale_row = 0;  // bytes, in the checkpoint as on the device but for padding
  int64_t host_scale_row = 0;

  int64_t ScaleOffset() const { return (rows * device_row + 255) / 256 * 256; }
  int64_t Bytes() const { return ScaleOffset() + (scale_rows * scale_row + 255) / 256 * 256; }
};

Layout LayoutOf(const LinearWeight& w) {
  const int64_t depth = CudaDepth(w.in);
  const int64_t rows = (w.out + kCudaTile - 1) / kCudaTile * kCudaTile;
  const int64_t blocks = (w.out + 127) / 128;
  switch (w.format) {
    case WeightFormat::kF32: return {w.in * 4, depth * 4, w.out, 0, 0, 0, 0};
    case WeightFormat::kBF16: return {w.in * 2, depth * 2, rows, 0, 0, 0, 0};
    case WeightFormat::kFp8Block128:
      return {w.in, depth, rows, blocks, blocks, depth / 128, depth / 128};
    case WeightFormat::kFp4Block32:
      return {w.in / 2, depth / 2, rows, w.out, rows, depth / 32, w.in / 32};
  }
  return {};
}

// [rows, host_row] to the first of [device_rows, device_row], zeros elsewhere.
void CopyRows(uint8_t* device, int64_t device_rows, int64_t device_row, const void* host,
              int64_t rows, int64_t host_row) {
  if (rows == 0) return;
  if (device_rows != rows || device_row != host_row) {
    FATHOM_CUDA_CHECK(cudaMemset(device, 0, static_cast<size_t>(device_rows * device_row)));
  }
  if (device_row == host_row) {
    FATHOM_CUDA_CHECK(
        cudaMemcpy(device, host, static_cast<size_t>(rows * host_row), cudaMemcpyHostToDevice));
    return;
  }
  FATHOM_CUDA_CHECK(cudaMemcpy2D(device, static_cast<size_t>(device_row), host,
                                 static_cast<size_t>(host_row), static_cast<size_t>(host_row),
                                 static_cast<size_t>(rows), cudaMemcpyHostToDevice));
}

__device__ uint32_t ToDevice(uint32_t codes, WeightFormat format) {
  if (format == WeightFormat::kFp4Block32) return ToFp4Word(codes);
  return format == WeightFormat::kFp8Block128 ? ToFp8Word(codes) : codes;
}
__device__ uint4 ToDevice(const uint4& piece, WeightFormat format) {
  return {ToDevice(piece.x, format), ToDevice(piece.y, format), ToDevice(piece.z, format),
          ToDevice(piece.w, format)};
}

constexpr int kTileThreads = 1024;
constexpr int kTilePieces = 16;  // of a thread at a time
constexpr int64_t kInPlacePieces = int64_t{kTileThreads} * kTilePieces / kCudaTile;  // of a row

// From rows of `units` units of `pieces` pieces, whose words ToDevice takes by `format`, to
// [units][16 rows][pieces], a block a tile. Rows of at most kInPlacePieces may be turned in place.
template <class Piece>
__global__ void __launch_bounds__(kTileThreads)
    TileRows(const Piece* from, Piece* to, int units, int pieces, WeightFormat format) {
  constexpr int kRows = static_cast<int>(kCudaTile);
  const int row_pieces = units * pieces, all = kRows * row_pieces;
  from += int64_t{blockIdx.x} * all;
  to += int64_t{blockIdx.x} * all;
  for (int base = 0; base < all; base += kTileThreads * kTilePieces) {
    Piece value[kTilePieces];
#pragma unroll
    for (int j = 0; j < kTilePieces; ++j) {
      const int i = base + j * kTileThreads + static_cast<int>(threadIdx.x);
      if (i < all) value[j] = ToDevice(from[i], format);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kTilePieces; ++j) {
      const int i = base + j * kTileThreads + static_cast<int>(threadIdx.x);
      if (i >= all) continue;
      const int row = i / row_pieces, unit = i % row_pieces / pieces;
      to[(unit * kRows + row) * pieces + i % pieces] = value[j];
    }
  }
}

// Brings rows on the device into the order of CudaWeightView. unit_bytes: of a row.
template <class Piece>
void Tile(uint8_t* data, int64_t rows, int64_t row_bytes, int64_t unit_bytes, WeightFormat format) {
  const auto pieces = static_cast<int>(unit_bytes / static_cast<int64_t>(sizeof(Piece)));
  const auto units = static_cast<int>(row_bytes / unit_bytes);
  auto* const at = reinterpret_cast<Piece*>(data);
  const Piece* from = at;
  void* copy = nullptr;
  if (int64_t{units} * pieces > kInPlacePieces) {
    const auto bytes = static_cast<size_t>(rows * row_bytes);
    FATHOM_CUDA_CHECK(cudaMalloc(&copy, bytes));
    FATHOM_CUDA_CHECK(cudaMemcpy(copy, data, bytes, cudaMemcpyDeviceToDevice));
    from = static_cast<const Piece*>(copy);
  }
  TileRows<<<static_cast<unsigned>(rows / kCudaTile), kTileThreads>>>(from, at, units, pieces,
                                                                      format);
  FATHOM_CUDA_CHECK(cudaGetLastError());
  if (copy != nullptr) FATHOM_CUDA_CHECK(cudaFree(copy));  // waits for the kernel
}

}  // namespace

CudaWeight::~CudaWeight() {
  for (void* memory : owned) {
    if (memory != nullptr) (void)cudaFree(memory);
  }
}

int64_t CudaWeightBytes(const LinearWeight& weight) {
  return LayoutOf(weight).Bytes();
}

void PackLinearCuda(LinearWeight& weight, const CudaAllocate& allocate) {
  const Layout layout = LayoutOf(weight);
  auto packed = std::make_shared<CudaWeight>();
  const int64_t bytes = layout.Bytes();
  void* memory = nullptr;
  if (allocate) {
    memory = allocate(bytes);
  } else {
    FATHOM_CUDA_CHECK(cudaMalloc(&memory, static_cast<size_t>(bytes)));
    packed->owned[0] = memory;
  }
  auto* data = static_cast<uint8_t*>(memory);
  uint8_t* scale = data + layout.ScaleOffset();
  CopyRows(data, layout.rows, layout.device_row, weight.data, weight.out, layout.host_row);
  CopyRows(scale, layout.scale_rows, layout.scale_row, weight.scale, layout.host_scale_rows,
           layout.host_scale_row);
  const bool fp4 = weight.format == WeightFormat::kFp4Block32;
  if (weight.format != WeightFormat::kF32 && weight.out > 0) {
    Tile<uint4>(data, layout.rows, layout.device_row, kCudaPiece, weight.format);
    if (fp4) Tile<uint32_t>(scale, layout.scale_rows, layout.scale_row, 4, WeightFormat::kBF16);
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
  for (int64_t i = 0; i < layout.host_scale_rows * layout.host_scale_row; ++i) {
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
