// ReplyWriter: a Generation as OpenAI JSON, streamed or whole. One per request; chat and plain
// completions differ. Other dialects (responses, messages) are further writers.
#pragma once

#include <memory>
#include <string>

#include "api/generation.h"

namespace fathom {

class ReplyWriter {
 public:
  virtual ~ReplyWriter() = default;
  // Appends server-sent events ("data: ...\n\n") for everything new and marks it taken. Per choice:
  // role or first chunk, deltas, one chunk with finish_reason.
  virtual void AppendEvents(std::string* out) = 0;
  // Appends a progress event: prompt tokens computed of all.
  virtual void AppendProgress(std::string* out) = 0;
  // After the last choice's finish: a chunk with usage and explanation if asked for, then [DONE].
  virtual void AppendEnd(std::string* out) = 0;
  // An error after the stream began, then [DONE].
  virtual void AppendError(const Error& error, std::string* out) = 0;
  // The whole reply, once settled() and without error().
  virtual std::string Body() = 0;
};

std::unique_ptr<ReplyWriter> MakeChatWriter(Generation& generation);
std::unique_ptr<ReplyWriter> MakeCompletionWriter(Generation& generation);

}  // namespace fathom
