// The writer of the plan's byte format, for tests: the inverse of jfa::DecodePlan.
#pragma once

#include <string>

#include "plan.h"

std::string EncodePlan(const jfa::LaunchPlan& plan, uint32_t version = jfa::kPlanVersion);
