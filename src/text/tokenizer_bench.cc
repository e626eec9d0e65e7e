// tokenizer_bench [TOKENIZER.json [TEXT_FILE...]]: speed of one thread, as CSV.
//
// Without arguments: the demo's tokenizer on texts made of its own documentation and of generated
// scripts. Columns: what was done, with which text, its megabytes, MB/s and tokens/s. Encoding is
// timed twice: cold, with nothing in the thread's cache, and warm.
#include <fmt/format.h>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "text/output_parser.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace fathom {
namespace {

struct Text {
  std::string name, bytes;
};

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string Repeat(const std::string& part, size_t bytes) {
  std::string text;
  while (!part.empty() && text.size() < bytes) text += part;
  return text;
}

// Words of 1 to 8 characters out of a range of code points.
std::string Generated(char32_t first, uint32_t count, bool spaces) {
  uint64_t state = 42;
  auto random = [&state](uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33) % n;
  };
  std::string text;
  while (text.size() < 1 << 20) {
    for (uint32_t k = 1 + random(8); k > 0; --k) AppendUtf8(text, first + random(count));
    if (spaces) text += ' ';
  }
  return text;
}

// CPU time, so that a busy machine shows the same numbers; only one thread works at a time.
double Seconds(auto&& work) {
  const std::clock_t begin = std::clock();
  work();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

void Row(std::string_view what, const Text& text, size_t tokens, double seconds) {
  const double megabytes = static_cast<double>(text.bytes.size()) / 1e6;
  fmt::print("{},{},{:.3f},{:.2f},{:.0f}\n", what, text.name, megabytes, megabytes / seconds,
             static_cast<double>(tokens) / seconds);
}

void Measure(const Tokenizer& tokenizer, const Text& text) {
  // A thread of its own begins with an empty cache.
  std::thread([&] {
    std::vector<TokenId> ids;
    for (const char* what : {"encode_cold", "encode_warm"}) {
      double seconds = Seconds([&] { ids = tokenizer.Encode(text.bytes, AddedTokens::kMatch); });
      Row(what, text, ids.size(), seconds);
    }
    Row("decode", text, ids.size(), Seconds([&] { tokenizer.Decode(ids, {}); }));
    auto encoder = ChatEncoder::Make(tokenizer);
    if (!encoder) return;
    OutputParser parser(tokenizer, *encoder, {.stop = {"</never>", "\x01"}});
    Row("output_parser", text, ids.size(), Seconds([&] {
          for (TokenId id : ids) parser.Push(id);
          parser.Finish();
        }));
  }).join();
}

int Main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : FATHOM_SOURCE_DIR "/models/demo/tokenizer.json";
  std::unique_ptr<Tokenizer> tokenizer;
  const Text file{"tokenizer.json", ReadAll(path)};
  fmt::print("what,text,MB,MB_per_s,tokens_per_s\n");
  double seconds = Seconds([&] {
    auto loaded = Tokenizer::Load(path);
    if (loaded) {
      tokenizer = std::move(*loaded);
    } else {
      fmt::print(stderr, "tokenizer_bench: {}\n", loaded.error().message);
    }
  });
  if (!tokenizer) return 1;
  Row("load", file, static_cast<size_t>(tokenizer->vocab_size()), seconds);
  std::vector<Text> texts;
  for (int i = 2; i < argc; ++i) texts.push_back({argv[i], ReadAll(argv[i])});
  if (texts.empty()) {
    const std::string source = FATHOM_SOURCE_DIR;
    texts = {{"english", Repeat(ReadAll(source + "/models/demo/README.md"), 1 << 20)},
             {"code", Repeat(ReadAll(source + "/src/text/tokenizer_json.cc"), 1 << 20)},
             {"chinese", Generated(0x4E00, 3000, false)},
             {"korean", Generated(0xAC00, 3000, true)},
             {"arabic", Generated(0x620, 32, true)},
             {"emoji", Generated(0x1F600, 64, true)},
             {"one_letter", std::string(1 << 20, 'a')}};
  }
  for (const Text& text : texts) Measure(*tokenizer, text);
  return 0;
}

}  // namespace
}  // namespace fathom

int main(int argc, char** argv) {
  return fathom::Main(argc, argv);
}
