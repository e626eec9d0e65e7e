#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>

#include "model/safetensors.h"
#include "model/strict_json.h"

namespace fathom {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "payloads are written as they lie");

Expected<int64_t> PayloadBytes(const TensorToWrite& tensor) {
  int64_t bytes = ElementBytes(tensor.dtype);
  for (const int64_t size : tensor.shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      return Fail(Code::kInvalidArgument, "tensor {}: bad shape {}", tensor.name,
                  ShapeText(tensor.dtype, tensor.shape));
    }
  }
  return bytes;
}

Expected<std::string> Header(std::span<const TensorToWrite> tensors,
                             const std::vector<size_t>& order) {
  json header = json::object();
  int64_t offset = 0;
  for (const size_t i : order) {
    const TensorToWrite& tensor = tensors[i];
    if (tensor.name.empty() || tensor.name == "__metadata__" || header.contains(tensor.name)) {
      return Fail(Code::kInvalidArgument, "tensor \"{}\": empty, reserved or repeated name",
                  tensor.name);
    }
    FATHOM_ASSIGN(const int64_t bytes, PayloadBytes(tensor));
    header[tensor.name] = {{"dtype", DTypeName(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const std::exception& e) {  // a name that is not UTF-8
    return Fail(Code::kInvalidArgument, "tensor names: {}", e.what());
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // payload begins 8-byte aligned
  return text;
}

}  // namespace

Status WriteSafeTensors(const std::string& path, std::span<const TensorToWrite> tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return ElementBytes(tensors[a].dtype) > ElementBytes(tensors[b].dtype);
  });
  FATHOM_ASSIGN(const std::string header, Header(tensors, order));

  const std::string temporary = fmt::format("{}.tmp{}", path, ::getpid());
  const auto refuse = [&](const char* what) {
    const int error = errno;
    ::unlink(temporary.c_str());
    return Fail(Code::kDataLoss, "{}: {}: {}", temporary, what, std::strerror(error));
  };
  std::FILE* file = std::fopen(temporary.c_str(), "wb");
  if (file == nullptr) return refuse("cannot be created");
  const uint64_t length = header.size();
  bool good = std::fwrite(&length, 8, 1, file) == 1 &&
              std::fwrite(header.data(), 1, header.size(), file) == header.size();
  for (size_t i = 0; good && i < order.size(); ++i) {
    const TensorToWrite& tensor = tensors[order[i]];
    const size_t bytes = static_cast<size_t>(PayloadBytes(tensor).value());
    good = bytes == 0 || std::fwrite(tensor.data, 1, bytes, file) == bytes;
  }
  if (!good) {
    const int error = errno;
    std::fclose(file);
    errno = error;
    return refuse("write failed");
  }
  if (std::fclose(file) != 0) return refuse("write failed");
  if (std::rename(temporary.c_str(), path.c_str()) != 0) return refuse("cannot be renamed");
  return {};
}

}  // namespace fathom
