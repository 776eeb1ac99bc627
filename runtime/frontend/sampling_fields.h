// The parameters that choose tokens and report on the choice: temperature to logprobs and n.
#ifndef BLINK_FRONTEND_SAMPLING_FIELDS_H
#define BLINK_FRONTEND_SAMPLING_FIELDS_H

#include <optional>
#include <string_view>

#include <boost/json/value.hpp>

#include "frontend/generation_request.h"
#include "frontend/request_parser.h"

namespace blink {

class SamplingFields {
 public:
  SamplingFields(const RequestLimits& limits, GenerationRequest& request)
      : limits_(limits), request_(request) {}

  // False: not a sampling parameter. Throws Rejected. `value` is not null.
  bool read(std::string_view name, const boost::json::value& value);

  // Once all fields were read: what depends on two of them, and what the target's sampler lacks.
  void finish();

 private:
  bool read_cuts(std::string_view name, const boost::json::value& value);
  bool read_penalty(std::string_view name, const boost::json::value& value);
  void read_logit_bias(const boost::json::value& value);
  void read_logprobs(std::string_view name, const boost::json::value& value);
  void finish_logprobs();
  void require_feature(std::string_view name, uint32_t feature, bool is_used) const;

  const RequestLimits& limits_;
  GenerationRequest& request_;
  std::optional<bool> wants_logprobs_;        // chats: logprobs
  std::optional<uint32_t> num_top_logprobs_;  // completions: logprobs; chats: top_logprobs
  std::optional<int64_t> best_of_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_SAMPLING_FIELDS_H
