// Warm equals cold: the same tokens and log-probabilities, to the last bit, whatever part of a
// prompt the prefix cache gave, from which tier, and after which history.
#include <gmock/gmock.h>

#include <algorithm>

#include "engine/testing_model.h"

namespace fathom {
namespace {

using Traced = std::vector<std::pair<TokenId, float>>;

class EnginePrefix : public DemoModelTest {
 protected:
  // Text of the checkpoint's own kind, as long as wanted.
  static std::vector<TokenId> Text(int64_t length, int64_t skip = 0) {
    std::vector<TokenId> text;
    for (size_t i = 0; static_cast<int64_t>(text.size()) < length + skip; ++i) {
      const auto& prompt = model_->golden[i % model_->golden.size()].prompt;
      text.insert(text.end(), prompt.begin(), prompt.end());
    }
    return {text.begin() + skip, text.begin() + skip + length};
  }

  struct Reply {
    Traced trace;
    Collector::Answer answer;
    int64_t cached = 0;
    RequestReport report;
  };

  static Request Make(const std::shared_ptr<Collector>& queue, std::vector<TokenId> prompt,
                      int64_t tokens) {
    Request request = Ask(queue, std::move(prompt), tokens);
    request.ignore_eos = true;
    request.logprobs = 0;
    return request;
  }

  static Reply Finish(const std::shared_ptr<Collector>& queue, RequestId id) {
    Reply reply;
    reply.answer = queue->Wait(id);
    EXPECT_EQ(reply.answer.finish, FinishReason::kLength) << reply.answer.error.message;
    reply.trace = Trace(reply.answer);
    reply.report = *reply.answer.report;
    reply.cached = reply.report.prefix.boundary;
    return reply;
  }

  static Reply Run(Engine& engine, std::vector<TokenId> prompt, int64_t tokens = 6,
                   const std::string& salt = "") {
    auto queue = std::make_shared<Collector>();
    Request request = Make(queue, std::move(prompt), tokens);
    request.cache_salt = salt;
    return Finish(queue, *engine.Submit(std::move(request)));
  }

  static std::unique_ptr<Engine> Cold() {
    return StartModel({.max_model_len = 8'192, .max_num_seqs = 2, .prefix_caching = false});
  }
};

TEST_F(EnginePrefix, ARepeatedPromptIsFoundButForItsLastToken) {
  auto warm = StartModel({.max_model_len = 8'192, .max_num_seqs = 4});
  auto cold = Cold();
  for (const int64_t length : {65,  66,  67,  68,  127, 128, 129,   130,   255,   256,   257,
                               258, 511, 512, 513, 514, 515, 2'047, 2'048, 2'049, 2'050, 2'051}) {
    if (kSanitized && length % 16 != 2) continue;
    const std::vector<TokenId> prompt = Text(length, length);
    const Reply right = Run(*cold, prompt);
    const Reply first = Run(*warm, prompt);
    const Reply second = Run(*warm, prompt);
    EXPECT_EQ(right.cached, 0);
    EXPECT_EQ(right.report.prefix.reason, MissReason::kDisabled);
    EXPECT_EQ(second.cached, length - 1) << second.report.prefix.Reason();
    EXPECT_EQ(second.report.prefix.reason, MissReason::kNone);
    EXPECT_TRUE(first.trace == right.trace) << length;
    EXPECT_TRUE(second.trace == right.trace) << length;
  }
  ASSERT_TRUE(warm->WaitIdle(std::chrono::seconds(60)));
  ExpectAllReturned(*warm);
}

TEST_F(EnginePrefix, PromptsThatPartAnywhereGoOnAsIfAlone) {
  const std::vector<TokenId> base = Text(700);
  const std::vector<TokenId> other = Text(400, 5'000);
  auto cold = Cold();
  auto warm = StartModel({.max_model_len = 2'048, .max_num_seqs = 4});
  Run(*warm, base);
  std::vector<int64_t> offsets;
  for (int64_t at = 0; at <= 300; at += kSanitized ? 31 : 1) {
    // Everywhere around the edges of groups and blocks; every fifth token elsewhere.
    if (at % 128 <= 5 || at % 128 >= 123 || at % 5 == 0) offsets.push_back(at);
  }
  int64_t hits = 0;
  for (const int64_t at : offsets) {
    std::vector<TokenId> prompt(base.begin(), base.begin() + at);
    prompt.insert(prompt.end(), other.begin() + at % 7, other.begin() + at % 7 + 80 + at % 5);
    if (at < 700 && prompt[static_cast<size_t>(at)] == base[static_cast<size_t>(at)]) {
      ++prompt[static_cast<size_t>(at)];
    }
    const Reply right = Run(*cold, prompt, 3);
    const Reply reply = Run(*warm, prompt, 3);
    EXPECT_TRUE(reply.trace == right.trace)
        << "parted at " << at << ", resumed at " << reply.cached;
    EXPECT_LE(reply.cached, at + 1);
    hits += reply.cached > 0 ? 1 : 0;
  }
  // The first to leave at an edge pays for the bundle; those behind it start there.
  EXPECT_GT(hits, static_cast<int64_t>(offsets.size()) / 2);
}

TEST_F(EnginePrefix, ASharedSystemPromptIsFoundFromTheSecondRequestOn) {
  auto warm = StartModel({.max_model_len = 8'192, .max_num_seqs = 4});
  auto cold = Cold();
  const std::vector<TokenId> system = Text(2'000);
  for (int i = 0; i < (kSanitized ? 3 : 20); ++i) {
    std::vector<TokenId> prompt = system;
    const std::vector<TokenId> question = Text(20 + 13 * i, 3'000 + 100 * i);
    prompt.insert(prompt.end(), question.begin(), question.end());
    const Reply reply = Run(*warm, prompt, 4);
    if (i > 0) {
      EXPECT_GE(reply.cached, 1'792) << i << ": " << reply.report.prefix.Reason();
    }
    if (i % 5 == 4) {
      EXPECT_TRUE(reply.trace == Run(*cold, prompt, 4).trace);
    }
  }
}

TEST_F(EnginePrefix, MarkedMessagesAreFoundToTheToken) {
  auto warm = StartModel({.max_model_len = 8'192, .max_num_seqs = 4});
  for (int i = 0; i < 3; ++i) {
    std::vector<TokenId> prompt = Text(1'003);
    const std::vector<TokenId> question = Text(900, 3'000 + 1'000 * i);
    prompt.insert(prompt.end(), question.begin(), question.end());
    prompt[1'003] = 300 + i;  // they part here
    auto queue = std::make_shared<Collector>();
    Request request = Make(queue, prompt, 2);
    request.boundaries = {1'003};
    const Reply reply = Finish(queue, *warm->Submit(std::move(request)));
    EXPECT_EQ(reply.cached, i == 0 ? 0 : 1'003) << reply.report.prefix.Reason();
  }
}

// 30 turns, each what the last one said and something new, with eight others in between.
TEST_F(EnginePrefix, ATurnComputesItsNewTokensAlone) {
  auto warm = StartModel({.max_model_len = 8'192, .max_num_seqs = 4, .num_blocks = 100});
  auto cold = Cold();
  std::vector<std::vector<TokenId>> talks(9);
  int64_t turns = 0, found = 0;
  for (int turn = 0; turn < (kSanitized ? 7 : 30); ++turn) {
    for (size_t who = 0; who < talks.size(); ++who) {
      if (who > 0 && turn >= 6) continue;  // the others fall silent one day
      std::vector<TokenId>& talk = talks[who];
      const auto before = static_cast<int64_t>(talk.size());
      const std::vector<TokenId> said =
          Text(70 + 11 * turn % 97, 200 * turn + 5'000 * static_cast<int64_t>(who));
      talk.insert(talk.end(), said.begin(), said.end());
      const Reply reply = Run(*warm, talk, 5);
      // All of the last turn but the token that ended it, which was never computed.
      if (turn > 0) {
        ++turns;
        EXPECT_GE(reply.cached, before - 1) << reply.report.prefix.Reason();
        found += reply.cached >= before - 1 ? 1 : 0;
      }
      if (who == 0 && turn % 6 == 5) {
        EXPECT_TRUE(reply.trace == Run(*cold, talk, 5).trace) << turn;
      }
      talk.insert(talk.end(), reply.answer.tokens.begin(), reply.answer.tokens.end());
    }
  }
  EXPECT_EQ(found, turns);
}

TEST_F(EnginePrefix, AHostTierGivesBackWhatTheDeviceHadNoRoomFor) {
  // Room for about one of the three prompts.
  auto warm = StartModel({.max_model_len = 1'536,
                          .max_num_seqs = 2,
                          .num_blocks = 7,
                          .num_bundles = 6,
                          .host_blocks = 30,
                          .host_bundles = 20});
  auto cold = Cold();
  std::vector<std::vector<TokenId>> prompts;
  for (int i = 0; i < 3; ++i) prompts.push_back(Text(1'200 + i, 2'000 * i));
  for (int round = 0; round < 3; ++round) {
    for (const auto& prompt : prompts) {
      const Reply reply = Run(*warm, prompt);
      EXPECT_TRUE(reply.trace == Run(*cold, prompt).trace);
      if (round == 0) continue;
      EXPECT_EQ(reply.cached, static_cast<int64_t>(prompt.size()) - 1)
          << reply.report.prefix.Reason();
      EXPECT_GT(reply.report.prefix.host_tokens, 0);
    }
  }
  EXPECT_GT(warm->stats().prefix.blocks_to_host, 0u);
  EXPECT_EQ(warm->stats().prompt_from_host + warm->stats().prompt_from_device +
                warm->stats().prompt_computed,
            warm->stats().prompt_tokens);
}

// Rows are there and windows are not: they are rebuilt from 128 tokens a layer, without writing
// rows.
TEST_F(EnginePrefix, WindowsAreRebuiltFromRows) {
  auto cold = Cold();
  for (const int step : {512, 100}) {
    auto warm = StartModel({.max_model_len = 8'192,
                            .max_num_seqs = 2,
                            .max_num_batched_tokens = step,
                            .num_bundles = 0});
    for (const int64_t length : {1'281, 1'282, 1'400, 1'537, 3'000}) {
      if (kSanitized && length != 1'282) continue;
      const std::vector<TokenId> prompt = Text(length, length);
      const Traced right = Run(*cold, prompt).trace;
      Run(*warm, prompt);
      const Reply reply = Run(*warm, prompt);
      const int64_t rows = (length - 1) / 256 * 256;
      EXPECT_EQ(reply.report.prefix.rebuilt, 6 * 128);
      EXPECT_EQ(reply.cached, rows - 6 * 128) << reply.report.prefix.Reason();
      EXPECT_EQ(reply.report.prefix.reason, MissReason::kNoBundle);
      EXPECT_TRUE(reply.trace == right) << length;
    }
    ASSERT_TRUE(warm->WaitIdle(std::chrono::seconds(60)));
    ExpectAllReturned(*warm);
  }
}

TEST_F(EnginePrefix, APreemptedSequenceGoesOnFromWhatIsStillThere) {
  auto cold = Cold();
  auto warm = StartModel({.max_model_len = 1'024, .max_num_seqs = 3, .num_blocks = 9}, {},
                         {.block_tokens = 128});
  auto queue = std::make_shared<Collector>();
  std::vector<Request> requests;
  std::vector<std::vector<TokenId>> prompts;
  for (int i = 0; i < 3; ++i) {
    prompts.push_back(Text(150 + 20 * i, 1'000 * i));
    requests.push_back(Make(queue, prompts.back(), 400));
  }
  const std::vector<RequestId> ids = *warm->SubmitAll(std::move(requests));
  std::vector<Reply> replies;  // all of them first: the engines share the compute threads
  for (const RequestId id : ids) replies.push_back(Finish(queue, id));
  int64_t preemptions = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    preemptions += replies[i].report.preemptions;
    EXPECT_TRUE(replies[i].trace == Run(*cold, prompts[i], 400).trace) << i;
  }
  EXPECT_GT(preemptions, 0);
}

// Cancels a request at the first word about it, on the engine's thread: no step comes in between.
class CancelsAtOnce : public Collector {
 public:
  explicit CancelsAtOnce(Engine* engine) : engine_(engine) {}
  void Deliver(std::vector<Output> outputs) override {
    for (const Output& output : outputs) {
      if (!output.finish) engine_->Cancel(output.id);
    }
    Collector::Deliver(std::move(outputs));
  }

 private:
  Engine* engine_;
};

TEST_F(EnginePrefix, ACancelledPromptIsFoundByItsRetry) {
  auto warm = StartModel({.max_model_len = 8'192, .max_num_seqs = 2});
  auto queue = std::make_shared<CancelsAtOnce>(warm.get());
  Request request = Make(queue, Text(7'000), 6);
  request.progress = true;
  const RequestId id = *warm->Submit(std::move(request));
  EXPECT_EQ(queue->Wait(id).finish, FinishReason::kCancelled);
  const Reply reply = Run(*warm, Text(7'000));
  EXPECT_GT(reply.cached, 0) << reply.report.prefix.Reason();
  auto cold = Cold();
  EXPECT_TRUE(reply.trace == Run(*cold, Text(7'000)).trace);
}

TEST_F(EnginePrefix, SaltsShareNothing) {
  auto warm = StartModel({.max_model_len = 2'048, .max_num_seqs = 2});
  const std::vector<TokenId> prompt = Text(600);
  Run(*warm, prompt, 2, "a");
  const Reply other = Run(*warm, prompt, 2, "b");
  EXPECT_EQ(other.cached, 0);
  EXPECT_EQ(other.report.prefix.reason, MissReason::kSaltDiffers);
  EXPECT_EQ(Run(*warm, prompt, 2, "a").cached, 599);
  EXPECT_EQ(Run(*warm, prompt, 2, "b").cached, 599);
}

TEST_F(EnginePrefix, PromptLogprobsAreComputedWhole) {
  auto warm = StartModel({.max_model_len = 2'048, .max_num_seqs = 2});
  const std::vector<TokenId> prompt = Text(300);
  Run(*warm, prompt, 2);
  auto queue = std::make_shared<Collector>();
  Request request = Make(queue, prompt, 2);
  request.prompt_logprobs = 0;
  const Reply reply = Finish(queue, *warm->Submit(std::move(request)));
  EXPECT_EQ(reply.cached, 0);
  EXPECT_EQ(reply.report.prefix.reason, MissReason::kDisabled);
  EXPECT_EQ(reply.answer.prompt_logprobs.size(), 299u);
}

TEST_F(EnginePrefix, EveryCacheFormatIsRestoredBitForBit) {
  const std::vector<TokenId> prompt = Text(533);
  for (const KvDType kv : {KvDType::kF32, KvDType::kBf16, KvDType::kFp8}) {
    for (const IndexDType index :
         {IndexDType::kF32, IndexDType::kBf16, IndexDType::kFp8, IndexDType::kMxfp4}) {
      for (const int block : {128, 256, 512}) {
        const auto numerics =
            kv == KvDType::kF32 ? ops::Numerics::kReference : ops::Numerics::kProduct;
        if ((kv == KvDType::kF32) != (index == IndexDType::kF32)) continue;
        if (kSanitized && block != 128) continue;
        auto warm = StartModel({.max_model_len = 1'024, .max_num_seqs = 2}, {},
                               {.kv = kv, .index = index, .block_tokens = block}, numerics);
        const Reply first = Run(*warm, prompt, 3);
        const Reply second = Run(*warm, prompt, 3);
        EXPECT_EQ(second.cached, 532) << second.report.prefix.Reason();
        EXPECT_TRUE(second.trace == first.trace);
      }
    }
  }
}

}  // namespace
}  // namespace fathom
