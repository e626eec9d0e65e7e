// For tests and benchmarks: an HTTP client on a loopback socket that can misbehave as it likes.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace fathom::testing {

struct RawReply {
  int status = 0;  // 0: nothing came
  std::string head, body;
};

// For each silence. A reply that comes is waited for, however busy the machine is.
inline constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(120);

class RawClient {
 public:
  explicit RawClient(int port);
  ~RawClient();
  RawClient(const RawClient&) = delete;

  bool Send(std::string_view data);
  // One reply, chunked bodies put together. The limit is for each silence.
  RawReply ReadReply(std::chrono::milliseconds limit = kPatience);
  std::string ReadUntil(std::string_view mark, std::chrono::milliseconds limit = kPatience);
  std::string ReadToEnd(std::chrono::milliseconds limit = kPatience);
  void ShrinkReceiveBuffer();
  void Close();

 private:
  bool Fill(std::chrono::milliseconds limit);
  int socket_ = -1;
  std::string received_;
};

// A POST request; `headers` are whole lines with CRLF.
std::string PostText(std::string_view path, std::string_view body, std::string_view headers = "");

// The payloads of a stream's "data: " events, [DONE] included.
std::vector<std::string> EventData(std::string_view stream);

}  // namespace fathom::testing
