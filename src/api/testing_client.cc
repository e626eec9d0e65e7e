#include "api/testing_client.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace fathom::testing {

RawClient::RawClient(int port) {
  socket_ = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) Close();
}

RawClient::~RawClient() {
  Close();
}

void RawClient::Close() {
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
}

void RawClient::ShrinkReceiveBuffer() {
  const int bytes = 2048;
  setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

bool RawClient::Send(std::string_view data) {
  while (!data.empty()) {
    const ssize_t sent = send(socket_, data.data(), data.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool RawClient::Fill(std::chrono::milliseconds limit) {
  pollfd entry{socket_, POLLIN, 0};
  if (socket_ < 0 || poll(&entry, 1, static_cast<int>(limit.count())) <= 0) return false;
  char chunk[65536];
  const ssize_t bytes = recv(socket_, chunk, sizeof chunk, 0);
  if (bytes <= 0) return false;
  received_.append(chunk, static_cast<size_t>(bytes));
  return true;
}

std::string RawClient::ReadUntil(std::string_view mark, std::chrono::milliseconds limit) {
  size_t end;
  while ((end = received_.find(mark)) == std::string::npos) {
    if (!Fill(limit)) return std::exchange(received_, "");
  }
  std::string text = received_.substr(0, end + mark.size());
  received_.erase(0, end + mark.size());
  return text;
}

std::string RawClient::ReadToEnd(std::chrono::milliseconds limit) {
  while (Fill(limit)) {
  }
  return std::exchange(received_, "");
}

RawReply RawClient::ReadReply(std::chrono::milliseconds limit) {
  RawReply reply;
  reply.head = ReadUntil("\r\n\r\n", limit);
  if (reply.head.size() > 12) reply.status = std::atoi(reply.head.c_str() + 9);
  const auto header = [&](std::string_view name) -> std::string {
    const size_t at = reply.head.find(name);
    if (at == std::string::npos) return "";
    const size_t begin = at + name.size();
    return reply.head.substr(begin, reply.head.find("\r\n", begin) - begin);
  };
  if (const std::string length = header("Content-Length: "); !length.empty()) {
    const size_t bytes = std::strtoull(length.c_str(), nullptr, 10);
    while (received_.size() < bytes && Fill(limit)) {
    }
    reply.body = received_.substr(0, bytes);
    received_.erase(0, bytes);
  } else if (!header("Transfer-Encoding: ").empty()) {
    for (;;) {
      const std::string line = ReadUntil("\r\n", limit);
      const size_t bytes = std::strtoull(line.c_str(), nullptr, 16);
      while (received_.size() < bytes + 2 && Fill(limit)) {
      }
      reply.body += received_.substr(0, bytes);
      received_.erase(0, std::min(received_.size(), bytes + 2));
      if (bytes == 0) break;
    }
  }
  return reply;
}

std::string PostText(std::string_view path, std::string_view body, std::string_view headers) {
  return fmt::format("POST {} HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n{}\r\n{}", path,
                     body.size(), headers, body);
}

std::vector<std::string> EventData(std::string_view stream) {
  std::vector<std::string> events;
  for (size_t at = 0; at < stream.size();) {
    const size_t end = std::min(stream.find("\n\n", at), stream.size());
    const std::string_view event = stream.substr(at, end - at);
    if (event.substr(0, 6) == "data: ") events.emplace_back(event.substr(6));
    at = end + 2;
  }
  return events;
}

}  // namespace fathom::testing
