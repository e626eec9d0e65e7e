// For tests, fuzzers and benchmarks of this folder: a model without weights. Tokens 0..255 are
// bytes, the V4 control tokens follow; replies come from a script.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "api/served_model.h"
#include "api/server.h"
#include "engine/engine.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace fathom::testing {

class ByteTokenizer : public Tokenizer {
 public:
  ByteTokenizer();
  std::vector<TokenId> Encode(std::string_view text, AddedTokens added) const override;
  std::string Decode(const std::vector<TokenId>& ids, DecodeOptions options) const override;
  std::string_view TokenBytes(TokenId id) const override;
  bool is_special(TokenId id) const override;
  bool is_added(TokenId id) const override { return id >= 256 && id < vocab_size(); }
  std::optional<TokenId> AddedTokenId(std::string_view content) const override;
  int64_t vocab_size() const override { return static_cast<int64_t>(tokens_.size()); }

 private:
  std::vector<std::string> tokens_;
};

// The model's next token given the history (prompt first); see engine/testing_executor.h.
using NextToken = std::function<TokenId(std::span<const TokenId> history)>;

struct FakeModelOptions {
  NextToken next_token;  // empty: repeats the last user text's bytes, then ends
  std::function<Status()> on_step;
  EngineOptions engine;
};

// A served model whose parts it owns.
class FakeModel {
 public:
  explicit FakeModel(FakeModelOptions options = {});

  ByteTokenizer tokenizer;
  std::unique_ptr<ChatEncoder> encoder;
  std::unique_ptr<Engine> engine;
  ServedModel served;

  TokenId eos() const { return encoder->eos(); }
  // A script that answers every prompt with `text`, then the end token.
  static NextToken Say(std::string text);
};

// A blocking HTTP client on a loopback socket that can misbehave as it likes.
struct RawReply {
  int status = 0;  // 0: nothing came
  std::string head, body;
};

class RawClient {
 public:
  explicit RawClient(int port);
  ~RawClient();
  RawClient(const RawClient&) = delete;

  bool Send(std::string_view data);
  // One reply, chunked bodies put together. The limit is for each silence.
  RawReply ReadReply(std::chrono::milliseconds limit = std::chrono::seconds(20));
  std::string ReadUntil(std::string_view mark,
                        std::chrono::milliseconds limit = std::chrono::seconds(20));
  std::string ReadToEnd(std::chrono::milliseconds limit = std::chrono::seconds(20));
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
