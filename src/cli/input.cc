#include "cli/input.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "text/utf8.h"

namespace fathom {
namespace {

Expected<std::string> ReadAll(std::FILE* file, const std::string& name) {
  std::string text;
  char buffer[1 << 16];
  size_t got = 0;
  while ((got = std::fread(buffer, 1, sizeof buffer, file)) > 0) text.append(buffer, got);
  if (std::ferror(file) != 0) {
    return Fail(Code::kDataLoss, "{}: {}", name, std::strerror(errno));
  }
  if (text.find('\0') != std::string::npos || !IsValidUtf8(text)) {
    return Fail(Code::kInvalidArgument, "{}: is not UTF-8 text", name);
  }
  return text;
}

}  // namespace

Expected<std::string> ReadStandardInput() {
  return ReadAll(stdin, "standard input");
}

Expected<std::string> ReadTextFile(const std::string& path) {
  if (std::error_code error; std::filesystem::is_directory(path, error)) {
    return Fail(Code::kInvalidArgument, "{}: is a directory", path);
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (file == nullptr) return Fail(Code::kNotFound, "{}: {}", path, std::strerror(errno));
  return ReadAll(file.get(), path);
}

Expected<std::string> ReadDocument(const std::string& path) {
  FATHOM_ASSIGN(std::string text, ReadTextFile(path));
  while (text.ends_with('\n')) text.pop_back();
  return text + "\n\n";
}

}  // namespace fathom
