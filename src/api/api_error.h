// Errors as HTTP clients see them: OpenAI's {"error": {message, type, param, code}}.
#pragma once

#include <string>

#include "core/status.h"

namespace fathom {

struct ApiError {
  int status = 400;  // HTTP
  std::string message;
  std::string type = "invalid_request_error";
  std::string param;    // empty: null
  std::string code;     // empty: null
  int retry_after = 0;  // seconds; > 0 adds a Retry-After header
};

// core/status.h says which code is which HTTP status; context_length_exceeded is kContextLength.
ApiError ToApiError(const Error& error);

// An error of HTTP itself (404, 405, 408, 413, 415, 431, ...): type and code from the status.
ApiError HttpError(int status, std::string message);

std::string OpenAiErrorBody(const ApiError& error);

}  // namespace fathom
