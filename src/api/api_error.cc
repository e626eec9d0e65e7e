#include "api/api_error.h"

#include "api/json_text.h"

namespace fathom {

ApiError ToApiError(const Error& error) {
  ApiError api;
  api.message = error.message;
  api.param = error.param;
  switch (error.code) {
    case Code::kInvalidArgument: api.code = "invalid_value"; break;
    case Code::kUnimplemented: api.code = "unsupported"; break;
    case Code::kContextLength: api.code = "context_length_exceeded"; break;
    case Code::kNotFound:
      api.status = 404;
      api.code = "not_found";
      break;
    case Code::kResourceExhausted:
      api.status = 429;
      api.type = "rate_limit_error";
      api.code = "rate_limit_exceeded";
      api.retry_after = 1;
      break;
    case Code::kUnavailable:
      api.status = 503;
      api.type = "service_unavailable_error";
      api.code = "service_unavailable";
      api.retry_after = 5;
      break;
    case Code::kCancelled:
      api.status = 503;
      api.type = "service_unavailable_error";
      api.code = "request_aborted";
      break;
    case Code::kDataLoss:
    case Code::kInternal:
      api.status = 500;
      api.type = "server_error";
      api.code = "internal_error";
      break;
  }
  return api;
}

ApiError HttpError(int status, std::string message) {
  ApiError api;
  api.status = status;
  api.message = std::move(message);
  switch (status) {
    case 401:
      api.type = "authentication_error";
      api.code = "invalid_api_key";
      break;
    case 404: api.code = "not_found"; break;
    case 405: api.code = "method_not_allowed"; break;
    case 408: api.code = "request_timeout"; break;
    case 413: api.code = "request_too_large"; break;
    case 415: api.code = "unsupported_encoding"; break;
    case 431: api.code = "headers_too_large"; break;
    case 501: api.code = "unsupported_transfer_encoding"; break;
    case 505: api.code = "http_version_not_supported"; break;
    case 503:
      api.type = "service_unavailable_error";
      api.code = "service_unavailable";
      api.retry_after = 5;
      break;
    default:
      api.code = status >= 500 ? "internal_error" : "bad_request";
      if (status >= 500) api.type = "server_error";
  }
  return api;
}

std::string OpenAiErrorBody(const ApiError& error) {
  std::string body = R"({"error":{"message":)";
  AppendJsonString(error.message, &body);
  body += R"(,"type":)";
  AppendJsonString(error.type, &body);
  body += R"(,"param":)";
  if (error.param.empty()) body += "null";
  else AppendJsonString(error.param, &body);
  body += R"(,"code":)";
  if (error.code.empty()) body += "null";
  else AppendJsonString(error.code, &body);
  body += "}}";
  return body;
}

}  // namespace fathom
