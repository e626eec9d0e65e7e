#include "api/testing.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine/testing_executor.h"

namespace fathom::testing {
namespace {

constexpr const char* kControls[] = {"<｜begin▁of▁sentence｜>",
                                     "<｜end▁of▁sentence｜>",
                                     "<｜User｜>",
                                     "<｜Assistant｜>",
                                     "<think>",
                                     "</think>",
                                     "<｜latest_reminder｜>"};
constexpr TokenId kUser = 258, kAssistant = 259, kThinkBegin = 260;

// Where generation began: behind the last assistant marker and its think marker, or behind the last
// '>' of a plain prompt.
size_t PromptEnd(std::span<const TokenId> history) {
  for (size_t i = history.size(); i-- > 0;) {
    if (history[i] == kAssistant) return i + 2;
  }
  for (size_t i = history.size(); i-- > 0;) {
    if (history[i] == '>') return i + 1;
  }
  return history.size();
}

// The last user turn's text, then the end.
TokenId EchoUser(std::span<const TokenId> history) {
  const size_t end = PromptEnd(history);
  size_t begin = std::min(end, history.size());
  while (begin > 0 && history[begin - 1] != kUser) --begin;
  const size_t at = begin + (history.size() - end);
  return at < history.size() && history[at] < 256 ? history[at] : 257;
}

}  // namespace

ByteTokenizer::ByteTokenizer() {
  for (int byte = 0; byte < 256; ++byte) tokens_.emplace_back(1, static_cast<char>(byte));
  for (const char* control : kControls) tokens_.emplace_back(control);
}

std::vector<TokenId> ByteTokenizer::Encode(std::string_view text, AddedTokens added) const {
  std::vector<TokenId> ids;
  for (size_t i = 0; i < text.size();) {
    TokenId id = static_cast<uint8_t>(text[i]);
    size_t length = 1;
    if (added == AddedTokens::kMatch && text[i] == '<') {
      for (TokenId control = 256; control < vocab_size(); ++control) {
        const std::string& content = tokens_[control];
        if (text.substr(i, content.size()) != content) continue;
        id = control;
        length = content.size();
      }
    }
    ids.push_back(id);
    i += length;
  }
  return ids;
}

std::string ByteTokenizer::Decode(const std::vector<TokenId>& ids, DecodeOptions options) const {
  Detokenizer detokenizer(*this, options.skip_special);
  std::string text;
  for (const TokenId id : ids) text += detokenizer.Push(id);
  return text + detokenizer.Finish();
}

std::string_view ByteTokenizer::TokenBytes(TokenId id) const {
  return id >= 0 && id < vocab_size() ? std::string_view(tokens_[id]) : std::string_view();
}

// As in V4's vocabulary the think markers are added tokens without the special flag.
bool ByteTokenizer::is_special(TokenId id) const {
  return is_added(id) && id != kThinkBegin && id != kThinkBegin + 1;
}

std::optional<TokenId> ByteTokenizer::AddedTokenId(std::string_view content) const {
  for (TokenId id = 256; id < vocab_size(); ++id) {
    if (tokens_[id] == content) return id;
  }
  return std::nullopt;
}

NextToken FakeModel::Say(std::string text) {
  const std::vector<TokenId> reply = ByteTokenizer().Encode(text, AddedTokens::kMatch);
  return [reply](std::span<const TokenId> history) {
    const size_t end = PromptEnd(history);
    const size_t at = history.size() - std::min(end, history.size());
    return at < reply.size() ? reply[at] : TokenId{257};
  };
}

FakeModel::FakeModel(FakeModelOptions options) {
  Expected<ChatEncoder> made = ChatEncoder::Make(tokenizer);
  FATHOM_CHECK(made.has_value());
  encoder = std::make_unique<ChatEncoder>(std::move(*made));
  ScriptedOptions script;
  script.geometry = ScriptedGeometry();
  script.vocab_size = tokenizer.vocab_size();
  script.limits.max_step_tokens = options.engine.max_num_batched_tokens;
  script.limits.max_logit_rows = std::max(64, options.engine.max_num_seqs);
  script.next_token = [next = options.next_token ? options.next_token : EchoUser](
                          RequestId, std::span<const TokenId> history) { return next(history); };
  if (options.on_step) {
    script.on_step = [step = options.on_step](const StepPlan&) { return step(); };
  }
  options.engine.eos_token = encoder->eos();
  if (options.engine.max_model_len == 0) options.engine.max_model_len = 65536;
  auto started = Engine::Start(options.engine, script.geometry, MakeScriptedExecutor(script));
  FATHOM_CHECK(started.has_value());
  engine = std::move(*started);
  served.engine = engine.get();
  served.tokenizer = &tokenizer;
  served.encoder = encoder.get();
  served.names = {"fake", "alias"};
  served.root = "/models/fake";
  served.max_model_len = options.engine.max_model_len;
}

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
