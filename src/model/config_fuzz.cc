// Any bytes as config.json: a config that passes is one whose tensor table can be built.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "model/config.h"
#include "model/config_overrides.h"
#include "model/tensor_names.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  // As overrides of itself: what passes merges, and stays JSON.
  if (const auto merged = fathom::OverrideConfig(text, "fuzz", text); merged && size > 0) {
    if (!fathom::OverrideConfig(*merged, "fuzz", "{}")) std::abort();
  }
  const auto config = fathom::ParseModelConfig(text, "fuzz");
  if (!config) {
    if (config.error().message.empty()) std::abort();
    return 0;
  }
  const int64_t experts = int64_t{config->num_experts} * config->num_layers;
  if (experts > 10000) return 0;  // sane, but a table too long for a fuzzer's patience
  for (const fathom::ExpectedTensor& tensor : fathom::ExpectedTensors(*config)) {
    if (tensor.bytes() <= 0) std::abort();
  }
  return 0;
}
