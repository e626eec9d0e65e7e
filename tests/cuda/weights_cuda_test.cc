// What the kernels do not take is refused before anything is loaded. Needs no device.
#include <gmock/gmock.h>

#include "model/cuda_weights.h"

namespace fathom {
namespace {

TEST(CheckForCuda, NamesWhatAKernelDoesNotTake) {
  ModelConfig config;
  config.hidden_size = 4'096;
  config.hc_eps = 1e-6f;
  EXPECT_TRUE(CheckForCuda(config));
  config.hidden_size = 16'384;
  EXPECT_THAT(CheckForCuda(config).error().message,
              testing::AllOf(testing::HasSubstr("hidden_size 16384"), testing::HasSubstr("8192")));
  config.hidden_size = 8'192;
  config.hc_eps = 0.1f;
  EXPECT_THAT(CheckForCuda(config).error().message, testing::HasSubstr("hc_eps 0.1"));
  config.hc_eps = 1e-6f;
  config.num_experts = 513;
  EXPECT_THAT(CheckForCuda(config).error().message, testing::HasSubstr("n_routed_experts 513"));
  config.num_experts = 512;
  config.experts_per_token = 33;
  EXPECT_THAT(CheckForCuda(config).error().message, testing::HasSubstr("num_experts_per_tok 33"));
  config.experts_per_token = 32;
  EXPECT_TRUE(CheckForCuda(config));
}

}  // namespace
}  // namespace fathom
