// ApiHandler: the RequestHandler of one io thread: admission of heads, routing, the short routes.
#pragma once

#include <memory>

#include "api/api_context.h"
#include "api/bridge.h"
#include "api/connection.h"
#include "api/router.h"

namespace fathom {

class ApiHandler : public RequestHandler {
 public:
  // `api` must outlive the handler.
  ApiHandler(ApiContext& api, std::shared_ptr<Bridge> bridge)
      : api_(api), bridge_(std::move(bridge)) {}

  const HttpLimits& limits() const override { return api_.options.limits; }
  std::optional<ApiError> CheckHead(const HttpRequest& request) override;
  boost::asio::awaitable<void> Handle(Connection& connection, HttpRequest request) override;
  bool closing() const override { return api_.draining; }
  std::vector<std::pair<std::string, std::string>> CommonHeaders(
      const HttpRequest& request) const override;

 private:
  bool Authorised(const HttpRequest& request) const;
  HttpResponse Short(const RouteMatch& match) const;

  ApiContext& api_;
  std::shared_ptr<Bridge> bridge_;
};

}  // namespace fathom
