//! What came of it, counted in the two databases after everything has stopped.

use std::{collections::HashMap, fmt};

use crate::{Error, shop::Shop, warehouse::Warehouse};

/// The counts of the last line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Audit {
    /// Orders in the shop's database.
    orders: u64,
    /// Orders that the shop rolled back after it had written their messages.
    rolled_back: u64,
    /// Distinct message keys that the relay's cursor has passed.
    published: u64,
    /// Orders that were shipped at least once.
    applied: u64,
    /// Orders without a shipment.
    lost: u64,
    /// Shipments beyond one for each order.
    doubled: u64,
    /// Shipments without an order.
    phantom: u64,
    /// Messages that the warehouse set aside.
    dead_letters: u64,
}

impl Audit {
    /// Counts in both databases.
    pub(crate) async fn take(shop: &Shop, warehouse: &Warehouse) -> Result<Self, Error> {
        let orders = shop.order_ids().await?;
        let shipments = warehouse.shipped_order_ids().await?;
        Ok(Self {
            rolled_back: shop.rolled_back(),
            published: shop.sent().await?,
            dead_letters: warehouse.dead_letters().await?,
            ..Self::compare(&orders, &shipments)
        })
    }

    /// Holds the orders against the shipments: `shipments` has an order as often as it was shipped.
    fn compare(orders: &[i64], shipments: &[i64]) -> Self {
        let mut times_shipped: HashMap<i64, u64> = orders.iter().map(|id| (*id, 0)).collect();
        let mut audit = Self {
            orders: orders.len() as u64,
            ..Self::default()
        };
        for id in shipments {
            match times_shipped.get_mut(id) {
                Some(times) => *times += 1,
                None => audit.phantom += 1,
            }
        }
        for times in times_shipped.values() {
            match times {
                0 => audit.lost += 1,
                times => {
                    audit.applied += 1;
                    audit.doubled += times - 1;
                }
            }
        }
        audit
    }

    /// One line for each thing that must not be; none when all went well.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut unless_zero = |count: u64, what: &str| {
            if count > 0 {
                problems.push(format!("FAILED: {count} {what}"));
            }
        };
        unless_zero(
            self.lost,
            "orders are in the shop's database and were never shipped (lost)",
        );
        unless_zero(
            self.doubled,
            "shipments are repeats of one that was made before (doubled)",
        );
        unless_zero(
            self.phantom,
            "shipments belong to no order in the shop's database (phantom)",
        );
        unless_zero(
            self.dead_letters,
            "messages were set aside by the warehouse; none should be",
        );
        unless_zero(
            self.orders.abs_diff(self.published),
            "is the difference between orders and published messages; there should be none",
        );
        problems
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "demo: orders={} rolled_back={} published={} applied={} lost={} doubled={} phantom={}",
            self.orders,
            self.rolled_back,
            self.published,
            self.applied,
            self.lost,
            self.doubled,
            self.phantom
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_shipped_once_is_no_problem() {
        let audit = Audit {
            published: 3,
            rolled_back: 1,
            ..Audit::compare(&[1, 2, 4], &[4, 1, 2])
        };
        assert_eq!(audit.problems(), Vec::<String>::new());
        assert_eq!(
            audit.to_string(),
            "demo: orders=3 rolled_back=1 published=3 applied=3 lost=0 doubled=0 phantom=0"
        );
    }

    #[test]
    fn lost_doubled_and_phantom_are_told_apart() {
        let audit = Audit::compare(&[1, 2, 3, 4], &[1, 1, 1, 2, 9, 9]);
        assert_eq!(
            (audit.applied, audit.lost, audit.doubled, audit.phantom),
            (2, 2, 2, 2)
        );
        let problems = audit.problems().join("\n");
        for word in ["lost", "doubled", "phantom", "published"] {
            assert!(problems.contains(word), "{problems}");
        }
    }
}
