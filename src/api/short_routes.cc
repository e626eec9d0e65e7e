#include "api/short_routes.h"

#include <ctime>

#include "api/generation.h"
#include "api/json_text.h"
#include "api/openai_request.h"

namespace fathom {
namespace {

using nlohmann::ordered_json;

HttpResponse JsonReply(const ordered_json& json, int status = 200) {
  HttpResponse response;
  response.status = status;
  response.body = DumpJson(json);
  return response;
}

ordered_json ModelJson(const ServedModel& model, const std::string& name) {
  static const int64_t started = static_cast<int64_t>(std::time(nullptr));
  return {{"id", name},
          {"object", "model"},
          {"created", started},
          {"owned_by", "fathom"},
          {"root", model.root},
          {"parent", nullptr},
          {"max_model_len", model.max_model_len}};
}

Expected<ordered_json> Tokenize(std::string_view body, const ServedModel& model) {
  FATHOM_ASSIGN(const nlohmann::json json, ParseJsonObject(body));
  FATHOM_ASSIGN(TokenizeRequest request, ParseTokenizeRequest(json, model));
  FATHOM_TRY(CheckModelName(request.model, model).map([](const std::string&) {}));
  std::vector<TokenId> ids;
  if (request.prompt) {
    ids = EncodePlain(*request.prompt, request.add_special_tokens, model);
  } else {
    FATHOM_ASSIGN(ids, model.encoder->Encode(request.messages, request.options));
  }
  ordered_json reply = {{"count", ids.size()}, {"max_model_len", model.max_model_len}};
  reply["tokens"] = ids;
  reply["token_strs"] = nullptr;
  if (request.return_token_strs) {
    ordered_json texts = ordered_json::array();
    for (const TokenId id : ids) texts.push_back(model.tokenizer->Decode({id}, {}));
    reply["token_strs"] = std::move(texts);
  }
  return reply;
}

Expected<ordered_json> Detokenize(std::string_view body, const ServedModel& model) {
  FATHOM_ASSIGN(const nlohmann::json json, ParseJsonObject(body));
  FATHOM_ASSIGN(const DetokenizeRequest request, ParseDetokenizeRequest(json, model));
  FATHOM_TRY(CheckModelName(request.model, model).map([](const std::string&) {}));
  ordered_json reply;
  reply["prompt"] = model.tokenizer->Decode(request.tokens, {});
  return reply;
}

}  // namespace

HttpResponse ErrorReply(const Error& error) {
  ApiError api = ToApiError(error);
  if (error.code == Code::kNotFound && error.param == "model") api.code = "model_not_found";
  return ErrorResponse(api);
}

HttpResponse ListModels(const ServedModel& model) {
  ordered_json data = ordered_json::array();
  for (const std::string& name : model.names) data.push_back(ModelJson(model, name));
  ordered_json reply;
  reply["object"] = "list";
  reply["data"] = std::move(data);
  return JsonReply(reply);
}

HttpResponse ShowModel(const ServedModel& model, std::string_view name) {
  const Expected<std::string> known = CheckModelName(std::string(name), model);
  if (!known) return ErrorReply(known.error());
  return JsonReply(ModelJson(model, *known));
}

HttpResponse Explain(const ExplainLog& log, std::string_view id) {
  Expected<std::string> found = log.Find(id);
  if (!found) {
    const bool unknown = found.error().code == Code::kNotFound;
    return ErrorResponse(HttpError(unknown ? 404 : 400, found.error().message));
  }
  HttpResponse response;
  response.body = std::move(*found);
  return response;
}

HttpResponse Health(const EngineStats& stats, bool draining,
                    std::chrono::milliseconds unhealthy_after) {
  ordered_json reply;
  const double limit = std::chrono::duration<double>(unhealthy_after).count();
  if (stats.running + stats.waiting > 0 && stats.seconds_since_step > limit) {
    reply["status"] = "unhealthy";
    reply["reason"] = fmt::format("{} requests wait and no step has ended for {:.1f} s",
                                  stats.running + stats.waiting, stats.seconds_since_step);
    return JsonReply(reply, 503);
  }
  reply["status"] = draining ? "draining" : "ok";
  return JsonReply(reply, draining ? 503 : 200);
}

HttpResponse TokenizeReply(std::string_view body, const ServedModel& model) {
  const Expected<ordered_json> reply = Tokenize(body, model);
  return reply ? JsonReply(*reply) : ErrorReply(reply.error());
}

HttpResponse DetokenizeReply(std::string_view body, const ServedModel& model) {
  const Expected<ordered_json> reply = Detokenize(body, model);
  return reply ? JsonReply(*reply) : ErrorReply(reply.error());
}

}  // namespace fathom
