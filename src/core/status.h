// Errors as values.
//
//   Expected<Config> ReadConfig(const std::string& path) {
//     FATHOM_ASSIGN(std::string text, ReadFile(path));
//     if (text.empty()) return Fail(Code::kInvalidArgument, "{}: empty file", path);
//     ...
//   }
//
// What input, files, peers or the machine can cause is an Expected<T>; FATHOM_CHECK is for our own
// mistakes. Exceptions never cross a folder's boundary.
#pragma once

#include <fmt/format.h>

#include <string>
#include <tl/expected.hpp>
#include <utility>

namespace fathom {

enum class Code {
  kInvalidArgument,    // the caller's input is wrong; HTTP 400
  kNotFound,           // a named thing does not exist; HTTP 404
  kContextLength,      // prompt or limit beyond the context; HTTP 400 context_length_exceeded
  kResourceExhausted,  // does not fit or the queue is full; HTTP 429
  kUnavailable,        // draining or not ready; HTTP 503
  kDataLoss,           // a file is truncated, corrupt or inconsistent
  kUnimplemented,      // understood, but not offered; HTTP 400
  kCancelled,          // the client went away or the request was aborted
  kInternal,           // our mistake; HTTP 500
};

struct Error {
  Code code = Code::kInternal;
  std::string message;  // one sentence that names the offending field, path or number
  std::string param;    // JSON field or flag the message is about; may be empty
};

template <class T>
using Expected = tl::expected<T, Error>;
using Status = Expected<void>;

template <class... Args>
tl::unexpected<Error> Fail(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return tl::unexpected<Error>(Error{code, fmt::format(format, std::forward<Args>(args)...), {}});
}

// As Fail, and names the request field or flag at fault.
template <class... Args>
tl::unexpected<Error> FailParam(Code code, std::string param, fmt::format_string<Args...> format,
                                Args&&... args) {
  return tl::unexpected<Error>(
      Error{code, fmt::format(format, std::forward<Args>(args)...), std::move(param)});
}

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace fathom

// States an invariant of our own. Never used on input.
#define FATHOM_CHECK(condition) \
  ((condition) ? void() : ::fathom::CheckFailed(__FILE__, __LINE__, #condition))

#define FATHOM_CONCAT_(a, b) a##b
#define FATHOM_CONCAT(a, b) FATHOM_CONCAT_(a, b)

// Returns the error of a Status expression from the enclosing function.
#define FATHOM_TRY(...)                                                     \
  do {                                                                      \
    if (auto status_ = (__VA_ARGS__); !status_.has_value())                 \
      return ::tl::unexpected<::fathom::Error>(std::move(status_.error())); \
  } while (false)

// Declares or assigns `target` from an Expected expression, or returns its error.
#define FATHOM_ASSIGN(target, ...) \
  FATHOM_ASSIGN_(FATHOM_CONCAT(expected_, __LINE__), target, __VA_ARGS__)
#define FATHOM_ASSIGN_(name, target, ...)                                                   \
  auto name = (__VA_ARGS__);                                                                \
  if (!name.has_value()) return ::tl::unexpected<::fathom::Error>(std::move(name.error())); \
  target = std::move(*name)
