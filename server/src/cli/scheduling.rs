//! Flags of the scheduler, and what they mean together.

use super::{parse_from, parse_whole};
use crate::size::parse_size;
use clap::error::ErrorKind;
use clap::{ArgAction, ArgMatches, Args, Command, FromArgMatches, ValueEnum};
use quire_engine::EngineConfig;
use quire_engine::config::PreemptionMode;
use quire_engine::scheduler::{DEFAULT_AGING_STEPS, Policy, PreemptionCosts};
use serde::Serialize;
use std::fmt;

/// The scheduler's settings, as the flags together make them.
pub struct Scheduling {
    policy: Policy,
    preemption: PreemptionMode,
    swap_bytes: usize,
    prefix_caching: bool,
    async_scheduling: Option<bool>,
}

#[derive(Args)]
#[command(next_help_heading = "Scheduling")]
struct SchedulingArgs {
    /// Who comes first
    #[arg(long, value_enum, default_value = "fcfs")]
    scheduling_policy: PolicyName,
    /// Steps after which a waiting request counts as one level of priority more urgent, with
    /// --scheduling-policy priority [default: 256]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = |text: &str| parse_from::<u32>(1, text),
    )]
    aging_steps: Option<u32>,
    /// Requests with equal beginnings share KV blocks [the default]
    #[arg(long, action = ArgAction::SetTrue, overrides_with = "no_enable_prefix_caching")]
    enable_prefix_caching: bool,
    /// They do not
    #[arg(long, action = ArgAction::SetTrue, overrides_with = "enable_prefix_caching")]
    no_enable_prefix_caching: bool,
    /// Memory for the KV blocks of preempted requests, such as 512M or 2GiB [default: none]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    swap_space: Option<usize>,
    /// What becomes of the KV blocks of a preempted request
    #[arg(long, value_enum, default_value = "auto")]
    preemption_mode: PreemptionName,
    /// Nanoseconds to compute a token and to copy a block one way, such as 90000,20000, for
    /// --preemption-mode auto [default: measured at start]
    #[arg(
        long,
        value_name = "RECOMPUTE_NS_PER_TOKEN,SWAP_NS_PER_BLOCK",
        allow_negative_numbers = true,
        value_parser = parse_costs,
    )]
    preemption_costs: Option<PreemptionCosts>,
    /// Plan each step before the results of the one before are known [default: on CUDA]
    #[arg(long, action = ArgAction::SetTrue, overrides_with = "no_async_scheduling")]
    async_scheduling: bool,
    /// Plan each step when they are
    #[arg(long, action = ArgAction::SetTrue, overrides_with = "async_scheduling")]
    no_async_scheduling: bool,
}

/// A [`Policy`] by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PolicyName {
    /// First come, first served
    Fcfs,
    /// The request with the smaller "priority" comes first and may preempt others
    Priority,
    /// Whole batches, each until its last request ends: the baseline that others are measured by
    Static,
}

impl PolicyName {
    /// The policy of this name; `aging_steps` are those of `priority`.
    pub fn policy(self, aging_steps: u32) -> Policy {
        match self {
            PolicyName::Fcfs => Policy::Fcfs,
            PolicyName::Priority => Policy::Priority { aging_steps },
            PolicyName::Static => Policy::Static,
        }
    }
}

impl From<Policy> for PolicyName {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Fcfs => PolicyName::Fcfs,
            Policy::Priority { .. } => PolicyName::Priority,
            Policy::Static => PolicyName::Static,
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().expect("none is hidden").get_name())
    }
}

/// A [`PreemptionMode`] by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PreemptionName {
    /// The cheaper of both
    Auto,
    /// Copied to the swap space, while there is room
    Swap,
    /// Computed anew
    Recompute,
}

fn parse_costs(text: &str) -> Result<PreemptionCosts, String> {
    let expected = || "must be two whole numbers, such as 90000,20000".to_owned();
    let (token, block) = text.split_once(',').ok_or_else(expected)?;
    Ok(PreemptionCosts {
        recompute_ns_per_token: parse_whole(token).map_err(|_| expected())?,
        swap_ns_per_block: parse_whole(block).map_err(|_| expected())?,
    })
}

impl SchedulingArgs {
    /// The settings, or why the flags contradict each other.
    fn settings(&self) -> Result<Scheduling, &'static str> {
        if self.aging_steps.is_some() && self.scheduling_policy != PolicyName::Priority {
            return Err("--aging-steps needs --scheduling-policy priority");
        }
        let aging_steps = self.aging_steps.unwrap_or(DEFAULT_AGING_STEPS);
        let swap_bytes = self.swap_space.unwrap_or(0);
        let preemption = match (self.preemption_mode, self.preemption_costs) {
            (PreemptionName::Auto, None) => PreemptionMode::Auto,
            (PreemptionName::Auto, Some(costs)) => PreemptionMode::Costs(costs),
            (_, Some(_)) => return Err("--preemption-costs needs --preemption-mode auto"),
            (PreemptionName::Swap, None) if swap_bytes == 0 => {
                return Err("--preemption-mode swap needs --swap-space");
            }
            (PreemptionName::Swap, None) => PreemptionMode::Swap,
            (PreemptionName::Recompute, None) => PreemptionMode::Recompute,
        };
        Ok(Scheduling {
            policy: self.scheduling_policy.policy(aging_steps),
            preemption,
            swap_bytes,
            prefix_caching: !self.no_enable_prefix_caching,
            async_scheduling: match (self.async_scheduling, self.no_async_scheduling) {
                (false, false) => None,
                (on, _) => Some(on),
            },
        })
    }
}

impl Scheduling {
    /// Puts the settings over `config`.
    pub fn apply(&self, config: &mut EngineConfig) {
        config.policy = self.policy;
        config.preemption = self.preemption;
        config.swap_bytes = self.swap_bytes;
        config.prefix_caching = self.prefix_caching;
        config.async_scheduling = self.async_scheduling;
    }
}

impl FromArgMatches for Scheduling {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let settings = SchedulingArgs::from_arg_matches(matches)?.settings();
        settings.map_err(|problem| clap::Error::raw(ErrorKind::ArgumentConflict, problem))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Scheduling {
    fn augment_args(command: Command) -> Command {
        SchedulingArgs::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        SchedulingArgs::augment_args_for_update(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(flags: &str) -> Result<EngineConfig, String> {
        let command = Scheduling::augment_args(Command::new("quire").no_binary_name(true));
        let matches = command.try_get_matches_from(flags.split_whitespace());
        let settings = matches.and_then(|matches| Scheduling::from_arg_matches(&matches));
        let mut config = EngineConfig::default();
        settings.map_err(|error| error.to_string())?.apply(&mut config);
        Ok(config)
    }

    #[test]
    fn without_flags_the_engines_defaults_hold() {
        assert_eq!(config(""), Ok(EngineConfig::default()));
    }

    #[test]
    fn flags_set_their_fields() {
        let costs = PreemptionCosts { recompute_ns_per_token: 90_000, swap_ns_per_block: 7 };
        let default = EngineConfig::default;
        for (flags, expected) in [
            (
                "--scheduling-policy priority --aging-steps 9",
                EngineConfig { policy: Policy::Priority { aging_steps: 9 }, ..default() },
            ),
            (
                "--scheduling-policy priority",
                EngineConfig {
                    policy: Policy::Priority { aging_steps: DEFAULT_AGING_STEPS },
                    ..default()
                },
            ),
            ("--scheduling-policy static", EngineConfig { policy: Policy::Static, ..default() }),
            (
                "--swap-space 2M --preemption-mode swap",
                EngineConfig { swap_bytes: 2 << 20, preemption: PreemptionMode::Swap, ..default() },
            ),
            (
                "--preemption-mode recompute",
                EngineConfig { preemption: PreemptionMode::Recompute, ..default() },
            ),
            (
                "--preemption-costs 90000,7",
                EngineConfig { preemption: PreemptionMode::Costs(costs), ..default() },
            ),
            ("--no-enable-prefix-caching", EngineConfig { prefix_caching: false, ..default() }),
            ("--no-enable-prefix-caching --enable-prefix-caching", default()),
            (
                "--enable-prefix-caching --no-enable-prefix-caching",
                EngineConfig { prefix_caching: false, ..default() },
            ),
            ("--async-scheduling", EngineConfig { async_scheduling: Some(true), ..default() }),
            ("--no-async-scheduling", EngineConfig { async_scheduling: Some(false), ..default() }),
            (
                "--no-async-scheduling --async-scheduling",
                EngineConfig { async_scheduling: Some(true), ..default() },
            ),
        ] {
            assert_eq!(config(flags), Ok(expected), "{flags}");
        }
    }

    #[test]
    fn policies_have_one_name() {
        for name in PolicyName::value_variants() {
            assert_eq!(PolicyName::from(name.policy(3)), *name);
            assert_eq!(serde_json::to_value(name).unwrap(), name.to_string());
        }
    }

    #[test]
    fn contradictions_and_bad_values_are_refused() {
        for (flags, problem) in [
            ("--aging-steps 9", "needs --scheduling-policy priority"),
            ("--aging-steps 0 --scheduling-policy priority", "from 1 to 4294967295"),
            ("--scheduling-policy lifo", "possible values: fcfs, priority, static"),
            ("--preemption-mode swap", "needs --swap-space"),
            ("--preemption-mode recompute --preemption-costs 1,2", "needs --preemption-mode auto"),
            ("--preemption-costs 1", "two whole numbers"),
            ("--preemption-costs 1,-2", "two whole numbers"),
            ("--swap-space 1X", "expected bytes"),
        ] {
            let error = config(flags).unwrap_err();
            assert!(error.contains(problem), "{flags}: {error}");
        }
    }
}
