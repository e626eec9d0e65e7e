// g++ 12 takes the frame allocator of Asio's coroutines for a mismatched pair once it is inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif

#include "cli/http_client.h"

#include <algorithm>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <exception>
#include <utility>

namespace fathom {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

constexpr uint64_t kMostBytes = uint64_t{64} << 20;

asio::awaitable<HttpReply> Get(HttpUrl url, std::string target, std::string api_key,
                               std::chrono::seconds limit) {
  asio::ip::tcp::resolver resolver(co_await asio::this_coro::executor);
  const auto found = co_await resolver.async_resolve(url.host, url.port, asio::use_awaitable);
  beast::tcp_stream stream(co_await asio::this_coro::executor);
  stream.expires_after(limit);
  co_await stream.async_connect(found, asio::use_awaitable);

  http::request<http::empty_body> request(http::verb::get, url.path + target, 11);
  const bool ipv6 = url.host.find(':') != std::string::npos;
  request.set(http::field::host, (ipv6 ? "[" + url.host + "]" : url.host) + ":" + url.port);
  request.set(http::field::accept, "application/json");
  request.set(http::field::connection, "close");
  if (!api_key.empty()) request.set(http::field::authorization, "Bearer " + api_key);
  co_await http::async_write(stream, request, asio::use_awaitable);

  beast::flat_buffer buffer;
  http::response_parser<http::string_body> parser;
  parser.body_limit(kMostBytes);
  co_await http::async_read(stream, buffer, parser, asio::use_awaitable);
  co_return HttpReply{static_cast<int>(parser.get().result_int()), std::move(parser.get().body())};
}

}  // namespace

Expected<HttpUrl> ParseHttpUrl(const std::string& url) {
  const auto refuse = [&](const char* why) {
    return FailParam(Code::kInvalidArgument, "--url", "'{}' is no URL like http://127.0.0.1:8000{}",
                     url, why);
  };
  constexpr std::string_view kScheme = "http://";
  if (url.rfind("https://", 0) == 0) return refuse(": https is not supported");
  if (url.rfind(kScheme, 0) != 0) return refuse("");
  const size_t slash = std::min(url.find('/', kScheme.size()), url.size());
  std::string authority = url.substr(kScheme.size(), slash - kScheme.size());
  HttpUrl parsed{.port = "80", .path = url.substr(slash)};
  while (!parsed.path.empty() && parsed.path.back() == '/') parsed.path.pop_back();
  if (!authority.empty() && authority.front() == '[') {
    const size_t close = authority.find(']');
    if (close == std::string::npos) return refuse(": a bracket is open");
    parsed.host = authority.substr(1, close - 1);
    authority.erase(0, close + 1);
    if (!authority.empty() && authority.front() != ':') return refuse("");
  } else {
    parsed.host = authority.substr(0, authority.find(':'));
    authority.erase(0, parsed.host.size());
  }
  if (!authority.empty()) parsed.port = authority.substr(1);
  const bool digits = !parsed.port.empty() && parsed.port.size() <= 5 &&
                      std::all_of(parsed.port.begin(), parsed.port.end(),
                                  [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || std::stoi(parsed.port) > 65535) return refuse(": the port is no number");
  if (parsed.host.empty()) return refuse(": the host is missing");
  return parsed;
}

Expected<HttpReply> HttpGet(const std::string& url, const std::string& target,
                            const std::string& api_key, std::chrono::seconds limit) {
  FATHOM_ASSIGN(HttpUrl parsed, ParseHttpUrl(url));
  HttpReply reply;
  std::exception_ptr failure;
  try {
    asio::io_context io;
    asio::co_spawn(io, Get(std::move(parsed), target, api_key, limit),
                   [&](std::exception_ptr error, HttpReply got) {
                     failure = std::move(error);
                     reply = std::move(got);
                   });
    io.run();
    if (failure) std::rethrow_exception(failure);
  } catch (const boost::system::system_error& error) {
    return FailParam(Code::kUnavailable, "--url", "{}: {}", url, error.code().message());
  } catch (const std::exception& error) {
    return FailParam(Code::kUnavailable, "--url", "{}: {}", url, error.what());
  }
  return reply;
}

std::string PercentEncode(const std::string& text) {
  constexpr std::string_view kPlain = "-._~";
  std::string encoded;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       kPlain.find(c) != std::string_view::npos;
    if (plain) encoded += c;
    else encoded += fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return encoded;
}

}  // namespace fathom
