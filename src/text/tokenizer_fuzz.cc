// tokenizer.json from a stranger: whatever the bytes, parsing gives a tokenizer or an error, and a
// tokenizer encodes and decodes without fault. Texts to encode are taken from the file itself.
//
//   build/fuzz/tokenizer_fuzz -max_len=65536 CORPUS models/demo/tokenizer.json
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/status.h"
#include "text/chat.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fathom;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  auto tokenizer = Tokenizer::Parse(bytes, "fuzz");
  if (!tokenizer) {
    FATHOM_CHECK(!tokenizer.error().message.empty());
    return 0;
  }
  const std::string_view text = bytes.substr(size / 3, 4096);
  for (AddedTokens added : {AddedTokens::kMatch, AddedTokens::kInert}) {
    const std::vector<TokenId> ids = (*tokenizer)->Encode(text, added);
    for (TokenId id : ids) FATHOM_CHECK(id >= 0 && id < (*tokenizer)->vocab_size());
    const std::string decoded = (*tokenizer)->Decode(ids, {});
    FATHOM_CHECK(IsValidUtf8(decoded));
    Detokenizer detokenizer(**tokenizer, false);
    std::string streamed;
    for (TokenId id : ids) streamed += detokenizer.Push(id);
    FATHOM_CHECK(streamed + detokenizer.Finish() == decoded);
  }
  auto encoder = ChatEncoder::Make(**tokenizer);
  if (!encoder) return 0;
  auto ids = encoder->Encode({{.content = std::string(text)}}, {.thinking = true});
  FATHOM_CHECK(ids.has_value());
  OutputParser parser(**tokenizer, *encoder, {.thinking = true, .stop = {"\n\n"}});
  for (TokenId id : *ids) parser.Push(id);
  parser.Finish();
  return 0;
}
