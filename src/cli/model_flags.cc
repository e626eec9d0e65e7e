#include "cli/model_flags.h"

#include "core/log.h"

namespace fathom {

void AddModelFlags(Command& command, ModelFlags& flags, ModelArgument argument) {
  RuntimeOptions& options = flags.options;
  constexpr int64_t kManyTokens = int64_t{1} << 32;
  constexpr char kModel[] =
      "directory, config.json or org/name in the Hugging Face cache; left out: the demo model";
  if (argument == ModelArgument::kPositional) {
    command.Positional("model", options.model, kModel);
  } else {
    command.Text("--model", options.model, "MODEL", kModel);
  }
  AddHfOverridesFlag(command, options.hf_overrides);
  command.Text("--tokenizer", options.tokenizer, "PATH",
               "directory or tokenizer.json, instead of the model's own");
  command.Count("--max-model-len", options.max_model_len, 0, kManyTokens,
                "context limit in tokens; left out or auto: the model's own", true);
  command.Count("--max-num-seqs", options.max_num_seqs, 1, 65536, "sequences running at once");
  command.Count("--max-num-batched-tokens", options.max_num_batched_tokens, 1, 1 << 20,
                "tokens of one step, prefill chunks included; left out or auto: 512, on a GPU 4096",
                true);
  command.Count("--block-size", options.block_size, 1, 1 << 20,
                "tokens of a cache block, a multiple of 128");
  command.Choice("--kv-cache-dtype", options.kv_cache_dtype, {"auto", "bf16", "fp8"},
                 "format of the attention cache; auto: fp8",
                 {{"fp8_e4m3", "fp8"}, {"fp8_ds_mla", "fp8"}, {"bfloat16", "bf16"}});
  command.Choice("--attention-config.indexer_kv_dtype", options.indexer_kv_dtype,
                 {"auto", "bf16", "fp8", "mxfp4"}, "format of the indexer's cache; auto: mxfp4");
  command.Switch("--attention-config.use_fp4_indexer_cache", flags.fp4_indexer_cache,
                 "vLLM's name for indexer_kv_dtype=mxfp4");
  command.Hide("--attention-config.use_fp4_indexer_cache");
  command.Count("--kv-cache-memory,--kv-cache-memory-bytes", options.kv_cache_memory, 0,
                int64_t{1} << 50,
                "bytes for the cache; left out: what one longest sequence needs, or 16 blocks for "
                "each of --max-num-seqs where that is more");
  command.Real("--gpu-memory-utilization", options.gpu_memory_utilization, 0, 1,
               "share of the machine's memory for weights and cache; 0: not limited");
  command.Choice("--device", flags.device, {"auto", "cpu", "cuda"},
                 "where the model runs; auto: a GPU when there is one");
  command.Choice("--numerics", flags.numerics, {"product", "reference"},
                 "reference: float32 without activation or cache rounding");
  command.Count("--threads", options.threads, 0, 4096, "compute threads; left out: one per CPU");
  command.Choice("--load-format", flags.load_format, {"auto", "dummy"},
                 "dummy: weights made from --seed, no checkpoint tensors read");
  command.Count("--seed", flags.seed, 0, int64_t{1} << 52, "seed of --load-format dummy");
  command.Choice("--log-level", flags.log_level,
                 {"trace", "debug", "info", "warning", "error", "off"}, "what goes to the log",
                 {{"warn", "warning"}, {"critical", "error"}});
}

void AddHfOverridesFlag(Command& command, std::string& overrides) {
  command.Text("--hf-overrides", overrides, "JSON",
               R"(keys of config.json to replace, say {"num_hidden_layers": 6})");
  command.NotEmpty("--hf-overrides");
}

Status CheckModelGiven(const Command& command, const std::string& model) {
  if (command.origin("model") == Origin::kDefault || !model.empty()) return {};
  return FailParam(Code::kInvalidArgument, "model",
                   "MODEL must not be empty: leave it out for the demo model");
}

Expected<RuntimeOptions> FinishModelFlags(const Command& command, const ModelFlags& flags) {
  FATHOM_TRY(SetUpLogging(flags.log_level));
  RuntimeOptions options = flags.options;
  options.device = flags.device;
  options.load_format = flags.load_format == "dummy" ? LoadFormat::kDummy : LoadFormat::kAuto;
  options.numerics =
      flags.numerics == "reference" ? ops::Numerics::kReference : ops::Numerics::kProduct;
  options.seed = static_cast<uint64_t>(flags.seed);
  FATHOM_TRY(CheckModelGiven(command, options.model));
  const char* fp4 = "--attention-config.use_fp4_indexer_cache";
  if (command.origin(fp4) != Origin::kDefault) {
    const std::string meant = flags.fp4_indexer_cache ? "mxfp4" : "fp8";  // vLLM's two choices
    if (command.origin("--attention-config.indexer_kv_dtype") != Origin::kDefault &&
        options.indexer_kv_dtype != "auto" && options.indexer_kv_dtype != meant) {
      return FailParam(Code::kInvalidArgument, fp4,
                       "{}={} contradicts --attention-config.indexer_kv_dtype {}", fp4,
                       flags.fp4_indexer_cache, options.indexer_kv_dtype);
    }
    options.indexer_kv_dtype = meant;
  }
  if (flags.options.kv_cache_memory > 0 && flags.options.gpu_memory_utilization > 0) {
    return FailParam(
        Code::kInvalidArgument, "--kv-cache-memory",
        "--kv-cache-memory and --gpu-memory-utilization both size the cache: give one");
  }
  return options;
}

}  // namespace fathom
