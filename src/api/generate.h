// The life of a generation request on its io thread: prepare, submit, stream or collect.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <memory>
#include <string>

#include "api/api_context.h"
#include "api/bridge.h"
#include "api/connection.h"

namespace fathom {

enum class Dialect { kChat, kCompletion };

// Answers on `connection`. A client that goes away, or reads too slowly, cancels its choices in the
// engine. Errors before the reply begins are HTTP errors, later ones an error event.
boost::asio::awaitable<void> Generate(ApiContext& api, std::shared_ptr<Bridge> bridge,
                                      Connection& connection, std::string body, Dialect dialect);

}  // namespace fathom
