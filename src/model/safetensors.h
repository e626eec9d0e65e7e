// safetensors files: a read-only mapping whose header has been checked completely, and a writer.
//
//   FATHOM_ASSIGN(SafeTensorsFile file, SafeTensorsFile::Open("model.safetensors"));
//   const TensorInfo* embed = file.Find("embed.weight");
//
// File: u64 little-endian header length n, n bytes of JSON {name: {dtype, shape, data_offsets}},
// then the payload, row-major, tensors side by side without gaps.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/status.h"

namespace fathom {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  // may be unaligned: the format promises nothing
  int64_t bytes = 0;
};

// "F32 [24, 1024]", for messages.
std::string ShapeText(DType dtype, std::span<const int64_t> shape);

// Checks the whole header of `file` (the complete file in memory) and returns its tensors, sorted
// by name, pointing into it. kDataLoss, naming `origin` and the tensor, for: a truncated file,
// a header longer than the file or 100 MB, bad JSON, duplicate names, unknown dtypes, shapes that
// overflow, offsets out of range, of the wrong size, overlapping or leaving gaps.
Expected<std::vector<TensorInfo>> ParseSafeTensors(std::span<const std::byte> file,
                                                   std::string_view origin);

// Copies share one mapping; it lives as long as any of them. Immutable, so any thread may read.
class SafeTensorsFile {
 public:
  static Expected<SafeTensorsFile> Open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // sorted by name
  const TensorInfo* Find(std::string_view name) const;                 // null: not there

 private:
  std::string path_;
  std::shared_ptr<const std::byte> mapping_;
  std::vector<TensorInfo> tensors_;
};

struct TensorToWrite {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // product(shape) elements
};

// Writes all tensors to a temporary name beside `path`, then renames it: `path` is either the old
// file or the complete new one. Wider element types come first, so every tensor is aligned.
// kInvalidArgument: duplicate or reserved name, negative dimension; kDataLoss: the disk refused.
Status WriteSafeTensors(const std::string& path, std::span<const TensorToWrite> tensors);

}  // namespace fathom
