// Fields of OpenAI's and vLLM's APIs that would change a reply and are not offered, and fields
// nobody here knows.
#pragma once

#include "api/field_reader.h"

namespace fathom {

// Refuses by name, with kUnimplemented, each field that would make the reply another one: ignoring
// it would answer a question nobody asked. Null and values that ask for nothing pass.
void RefuseUnsupported(FieldReader& fields);
void RefuseUnsupportedInChat(FieldReader& fields);

// Logs the fields of the body that no reader asked for, at debug level and once per name: a
// misspelt field shows up without a line for every request. The number of names kept is bounded.
void LogIgnoredFields(const FieldReader& fields);

}  // namespace fathom
