// The front end as one object: HTTP server and pipeline, started and stopped together.
#ifndef BLINK_FRONTEND_FRONT_END_H
#define BLINK_FRONTEND_FRONT_END_H

#include <chrono>
#include <memory>
#include <utility>

#include "frontend/front_end_config.h"
#include "frontend/generation_pipeline.h"
#include "frontend/http_entrance.h"
#include "frontend/http_server.h"

namespace blink {

class FrontEnd {
 public:
  // Attaches to the ring and listens. Throws RingError or std::runtime_error.
  FrontEnd(FrontEndConfig config, std::unique_ptr<Transport> transport,
           std::shared_ptr<const TextCodec> codec, TemplateRenderer render, HttpEntrance entrance);
  // The same with an entrance of its own.
  FrontEnd(const FrontEndConfig& config, std::unique_ptr<Transport> transport,
           std::shared_ptr<const TextCodec> codec, TemplateRenderer render)
      : FrontEnd(config, std::move(transport), std::move(codec), std::move(render),
                 HttpEntrance(config)) {}
  ~FrontEnd();

  void start();
  // Takes no more requests, lets running ones end within `patience`, aborts the rest, and returns.
  void stop(std::chrono::milliseconds patience);

  // Reads keys and certificate again and opens the access log anew. Throws std::runtime_error, and
  // goes on with what there was.
  void reload() { server_.reload(); }

  uint16_t port() const { return server_.port(); }
  Health health() const { return pipeline_.health(); }
  GenerationPipeline& pipeline() { return pipeline_; }

 private:
  FrontEndConfig config_;
  GenerationPipeline pipeline_;
  HttpServer server_;  // destroyed first: its sessions use the pipeline
  bool is_running_ = false;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_FRONT_END_H
