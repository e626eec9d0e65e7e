#include "model/safetensors.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "model/strict_json.h"

namespace fathom {
namespace {

using nlohmann::json;

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxRank = 8;

std::optional<DType> ParseDType(std::string_view name) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E8M0,
                           DType::kI8, DType::kI32, DType::kI64}) {
    if (DTypeName(type) == name) return type;
  }
  return std::nullopt;
}

// A JSON integer in [0, 2^63).
std::optional<int64_t> Unsigned(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  return static_cast<int64_t>(number);
}

struct Entry {
  TensorInfo info;
  int64_t begin = 0;
  int64_t end = 0;
};

Expected<Entry> ParseEntry(const std::string& name, const json& value, int64_t payload,
                           std::string_view origin) {
  const auto bad = [&](const std::string& what) {
    return Fail(Code::kDataLoss, "{}: tensor {}: {}", origin, name, what);
  };
  if (name.empty()) return bad("empty name");
  if (!value.is_object()) return bad("the header entry is not an object");
  for (const auto& item : value.items()) {
    if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets") {
      return bad(fmt::format("unknown header field {}", ShortJson(item.key())));
    }
  }
  for (const char* field : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(field)) return bad(fmt::format("header field {} is missing", field));
  }
  Entry entry;
  entry.info.name = name;

  const json& dtype = value["dtype"];
  if (!dtype.is_string()) return bad("dtype is not a string");
  const std::optional<DType> type = ParseDType(dtype.get_ref<const std::string&>());
  if (!type) return bad(fmt::format("dtype {} is not supported", ShortJson(dtype)));
  entry.info.dtype = *type;

  const json& shape = value["shape"];
  if (!shape.is_array() || shape.size() > kMaxRank) {
    return bad(
        fmt::format("shape {} is not a list of at most {} sizes", ShortJson(shape), kMaxRank));
  }
  int64_t bytes = ElementBytes(*type);
  for (const json& size : shape) {
    const std::optional<int64_t> n = Unsigned(size);
    if (!n) return bad(fmt::format("shape {} has a bad size", ShortJson(shape)));
    if (__builtin_mul_overflow(bytes, *n, &bytes)) {
      return bad(fmt::format("shape {} overflows", ShortJson(shape)));
    }
    entry.info.shape.push_back(*n);
  }
  entry.info.bytes = bytes;

  const json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !Unsigned(offsets[0]) ||
      !Unsigned(offsets[1]) || *Unsigned(offsets[0]) > *Unsigned(offsets[1])) {
    return bad(fmt::format("data_offsets {} are not [begin, end]", ShortJson(offsets)));
  }
  entry.begin = *Unsigned(offsets[0]);
  entry.end = *Unsigned(offsets[1]);
  if (entry.end - entry.begin != bytes) {
    return bad(fmt::format("data_offsets span {} bytes, {} needs {}", entry.end - entry.begin,
                           ShapeText(*type, entry.info.shape), bytes));
  }
  if (entry.end > payload) {
    return bad(fmt::format("data ends at byte {} of a payload of {}: the file is truncated",
                           entry.end, payload));
  }
  return entry;
}

// Tensors must tile the payload: no byte belongs to two of them or to none.
Status CheckTiling(std::vector<Entry>& entries, int64_t payload, std::string_view origin) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  int64_t end = 0;
  std::string_view previous;
  for (const Entry& entry : entries) {
    if (entry.begin < end) {
      return Fail(Code::kDataLoss, "{}: tensor {}: overlaps tensor {}", origin, entry.info.name,
                  previous);
    }
    if (entry.begin > end) {
      return Fail(Code::kDataLoss, "{}: tensor {}: {} unused bytes in front of it", origin,
                  entry.info.name, entry.begin - end);
    }
    end = entry.end;
    previous = entry.info.name;
  }
  if (end != payload) {
    return Fail(Code::kDataLoss, "{}: {} bytes after the last tensor", origin, payload - end);
  }
  return {};
}

Status CheckMetadata(const json& metadata, std::string_view origin) {
  bool strings = metadata.is_object();
  if (strings) {
    for (const json& value : metadata) strings = strings && value.is_string();
  }
  if (!strings) {
    return Fail(Code::kDataLoss, "{}: __metadata__ is not an object of strings", origin);
  }
  return {};
}

}  // namespace

std::string ShapeText(DType dtype, std::span<const int64_t> shape) {
  return fmt::format("{} [{}]", DTypeName(dtype), fmt::join(shape, ", "));
}

Expected<std::vector<TensorInfo>> ParseSafeTensors(std::span<const std::byte> file,
                                                   std::string_view origin) {
  if (file.size() < 8) {
    return Fail(Code::kDataLoss, "{}: {} bytes, too short for a safetensors file", origin,
                file.size());
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | std::to_integer<uint64_t>(file[i]);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes) || length > file.size() - 8) {
    return Fail(Code::kDataLoss,
                "{}: header of {} bytes in a file of {}: truncated or no "
                "safetensors file",
                origin, length, file.size());
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + 8, length);
  if (text.empty() || text[0] != '{') {
    return Fail(Code::kDataLoss, "{}: the header does not begin with '{{'", origin);
  }
  auto header = ParseStrictJson(text, origin);
  if (!header) return Fail(Code::kDataLoss, "{}", header.error().message);

  const std::byte* payload = file.data() + 8 + length;
  const int64_t payload_bytes = static_cast<int64_t>(file.size() - 8 - length);
  std::vector<Entry> entries;
  entries.reserve(header->size());
  for (const auto& item : header->items()) {
    if (item.key() == "__metadata__") {
      FATHOM_TRY(CheckMetadata(item.value(), origin));
      continue;
    }
    FATHOM_ASSIGN(Entry entry, ParseEntry(item.key(), item.value(), payload_bytes, origin));
    entries.push_back(std::move(entry));
  }
  FATHOM_TRY(CheckTiling(entries, payload_bytes, origin));

  std::vector<TensorInfo> tensors;
  tensors.reserve(entries.size());
  for (Entry& entry : entries) {
    entry.info.data = payload + entry.begin;
    tensors.push_back(std::move(entry.info));
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  return tensors;
}

Expected<SafeTensorsFile> SafeTensorsFile::Open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return Fail(Code::kNotFound, "{}: cannot be opened: {}", path, std::strerror(errno));
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return Fail(Code::kDataLoss, "{}: not a regular file", path);
  }
  const size_t size = static_cast<size_t>(info.st_size);
  SafeTensorsFile file;
  file.path_ = path;
  if (size > 0) {
    void* base = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    ::close(fd);
    if (base == MAP_FAILED) {
      return Fail(Code::kDataLoss, "{}: cannot be mapped: {}", path, std::strerror(error));
    }
    file.mapping_ = std::shared_ptr<const std::byte>(
        static_cast<const std::byte*>(base),
        [size](const std::byte* p) { ::munmap(const_cast<std::byte*>(p), size); });
  } else {
    ::close(fd);
  }
  FATHOM_ASSIGN(file.tensors_, ParseSafeTensors({file.mapping_.get(), size}, path));
  return file;
}

const TensorInfo* SafeTensorsFile::Find(std::string_view name) const {
  const auto it =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const TensorInfo& a, std::string_view b) { return a.name < b; });
  return it != tensors_.end() && it->name == name ? &*it : nullptr;
}

}  // namespace fathom
