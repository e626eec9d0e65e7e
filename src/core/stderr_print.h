// Messages for a person, on standard error:
//   PrintStderr("fathom: ready at {}\n", address);
// Unlike fmt::print these never throw: the reader of the messages may have gone (a closed terminal,
// a log collector that died) or its disk may be full, and neither may end a server or an answer.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace fathom {

// Writes and flushes `text`; what does not arrive is lost.
void WriteStderr(std::string_view text) noexcept;

template <typename... Arguments>
void PrintStderr(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  WriteStderr(fmt::format(format, std::forward<Arguments>(arguments)...));
}

}  // namespace fathom
