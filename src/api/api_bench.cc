// What a streamed token costs above the engine: detokenisation, the event's JSON, and the way
// through the socket.
#include <benchmark/benchmark.h>

#include <thread>

#include "api/generation.h"
#include "api/json_text.h"
#include "api/reply_writer.h"
#include "api/server.h"
#include "api/testing_client.h"
#include "api/testing_model.h"

namespace fathom {
namespace {

constexpr char kBody[] = R"({"messages":[{"role":"user","content":"q"}],"stream":true})";

// One token in, one event out.
void BM_ChatEvent(benchmark::State& state) {
  testing::FakeModel model;
  Generation generation(*PrepareChat(kBody, model.served), model.served, "chatcmpl-0123456789", 1);
  const auto writer = MakeChatWriter(generation);
  std::string events;
  for (auto _ : state) {
    Output output;
    output.tokens = {'a'};
    generation.Accept(0, std::move(output));
    events.clear();
    writer->AppendEvents(&events);
    benchmark::DoNotOptimize(events.data());
  }
}
BENCHMARK(BM_ChatEvent);

void BM_ParseChatRequest(benchmark::State& state) {
  testing::FakeModel model;
  const std::string body = R"({"messages":[{"role":"user","content":")" +
                           std::string(static_cast<size_t>(state.range(0)), 'x') + "\"}]}";
  for (auto _ : state) {
    const auto json = ParseJsonObject(body);
    benchmark::DoNotOptimize(ParseChatRequest(*json, model.served));
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * body.size()));
}
BENCHMARK(BM_ParseChatRequest)->Arg(100)->Arg(1 << 20);

// Streams of 1,000 events each through real sockets; items are events. The clients read raw bytes.
void BM_StreamsOverSockets(benchmark::State& state) {
  testing::FakeModelOptions options;
  options.next_token = [](auto) { return TokenId{'a'}; };
  options.engine.max_num_seqs = 256;
  options.engine.max_num_batched_tokens = 4096;
  testing::FakeModel model(std::move(options));
  ServerOptions server_options;
  server_options.host = "127.0.0.1";
  server_options.port = 0;
  const auto server = *Server::Start(server_options, model.served);
  const int streams = static_cast<int>(state.range(0));
  const std::string request = testing::PostText(
      "/v1/chat/completions",
      R"({"messages":[{"role":"user","content":"q"}],"stream":true,"max_tokens":1000})");
  for (auto _ : state) {
    std::vector<std::unique_ptr<testing::RawClient>> clients;
    for (int i = 0; i < streams; ++i) {
      clients.push_back(std::make_unique<testing::RawClient>(server->port()));
      clients.back()->Send(request);
    }
    for (auto& client : clients) client->ReadUntil("[DONE]");
  }
  state.SetItemsProcessed(state.iterations() * streams * 1000);
}
BENCHMARK(BM_StreamsOverSockets)->Arg(1)->Arg(64)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace fathom

BENCHMARK_MAIN();
