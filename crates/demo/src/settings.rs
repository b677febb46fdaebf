//! How large the demo is: raw environment in, checked settings out.

use std::{env, ops::RangeInclusive};

/// Names the number of orders.
const ORDERS_VARIABLE: &str = "DEMO_ORDERS";

/// Large enough for two faults, and for a run of well under a minute.
const ORDERS_DEFAULT: u64 = 20_000;

/// With fewer there is no middle to put a fault into; with more the servers outgrow a laptop's memory.
const ORDERS_BOUNDS: RangeInclusive<u64> = 100..=1_000_000;

/// Checked settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Orders that are placed; those that are rolled back come on top. 100 to 1,000,000, default 20,000.
    pub(crate) orders: u64,
}

impl Settings {
    /// From the environment. The error is one line that names the variable and the remedy.
    pub(crate) fn from_env() -> Result<Self, String> {
        match env::var_os(ORDERS_VARIABLE) {
            None => Self::parse(""),
            Some(value) => Self::parse(&value.to_string_lossy()),
        }
    }

    fn parse(value: &str) -> Result<Self, String> {
        let value = value.trim();
        let orders = if value.is_empty() {
            Some(ORDERS_DEFAULT)
        } else {
            value.parse().ok()
        };
        match orders {
            Some(orders) if ORDERS_BOUNDS.contains(&orders) => Ok(Self { orders }),
            _ => Err(format!(
                "{ORDERS_VARIABLE} is {value:?}; it must be a number from {} to {}, or unset for {ORDERS_DEFAULT}",
                ORDERS_BOUNDS.start(),
                ORDERS_BOUNDS.end(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_within_the_bounds_is_taken() {
        for (value, orders) in [
            ("", 20_000),
            (" ", 20_000),
            ("100", 100),
            (" 500\n", 500),
            ("1000000", 1_000_000),
        ] {
            assert_eq!(Settings::parse(value), Ok(Settings { orders }), "{value:?}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_the_bounds() {
        for value in ["0", "99", "1000001", "-5", "2e4", "20k", "many", "1.5"] {
            let problem = Settings::parse(value).unwrap_err();
            assert!(problem.contains(value), "{problem}");
            assert!(problem.contains("100 to 1000000"), "{problem}");
        }
    }
}
