#include "model/identity.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

namespace fathom {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kHead = int64_t{1} << 20;
constexpr int64_t kSample = 4096;
constexpr int64_t kSamples = 256;

// Two independent 64-bit FNV-1a sums: an identity against mistakes, not against an attacker, who
// could edit unsampled bytes anyway.
class Sum {
 public:
  void Add(const char* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      const auto byte = static_cast<uint8_t>(data[i]);
      a_ = (a_ ^ byte) * 0x100000001b3u;
      b_ = (b_ ^ (byte + 0x9eu)) * 0x100000001b3u;
    }
  }
  void Add(std::string_view text) { Add(text.data(), text.size()); }
  std::string Hex() const { return fmt::format("{:016x}{:016x}", a_, b_); }

 private:
  uint64_t a_ = 0xcbf29ce484222325u, b_ = 0x84222325cbf29ce4u;
};

Status AddFile(const fs::path& path, Sum* sum) {
  std::error_code error;
  const auto size = static_cast<int64_t>(fs::file_size(path, error));
  std::ifstream file(path, std::ios::binary);
  if (error || !file) return Fail(Code::kNotFound, "{}: cannot be read", path.string());
  sum->Add(fmt::format("{} {} ", path.filename().string(), size));
  std::vector<char> buffer(static_cast<size_t>(kHead));
  const auto add = [&](int64_t at, int64_t bytes) {
    file.seekg(at);
    file.read(buffer.data(), std::min(bytes, size - at));
    sum->Add(buffer.data(), static_cast<size_t>(file.gcount()));
  };
  add(0, kHead);
  for (int64_t i = 1; i <= kSamples && size > kHead; ++i) {
    add(kHead + (size - kHead) / (kSamples + 1) * i, kSample);
  }
  return {};
}

}  // namespace

Expected<std::string> WeightsIdentity(const std::string& directory) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    if (at->path().extension() == ".safetensors") files.push_back(at->path());
  }
  if (error) return Fail(Code::kNotFound, "{}: {}", directory, error.message());
  std::sort(files.begin(), files.end());
  Sum sum;
  for (const fs::path& file : files) FATHOM_TRY(AddFile(file, &sum));
  return sum.Hex();
}

std::string TextIdentity(std::string_view text) {
  Sum sum;
  sum.Add(text);
  return sum.Hex();
}

}  // namespace fathom
