//! Orders to the supervisor of a host's ranks, and its news to those who gave them.

use super::Interrupts;
use super::supervise::Blame;

/// A task for a host's ranks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    /// A signal to this process: the first lets the ranks save and end, the second kills them.
    Signal(i32),
    /// This signal interrupted another host's ranks.
    Interrupt(i32),
    /// Another host's ranks were killed by their user.
    Kill,
    /// The job has failed elsewhere.
    End,
}

/// An event of a host's ranks.
pub(super) enum News<'a> {
    Interrupted(i32),
    Killed,
    Failed(&'a Blame),
}

/// Giver of orders.
pub(super) trait Orders {
    /// The next order, if there is one. Does not wait.
    fn next(&mut self) -> Option<Order>;
    /// Takes news, each before the ranks are ended for it.
    fn tell(&mut self, news: News<'_>);
}

/// The user of a single host.
impl Orders for Interrupts {
    fn next(&mut self) -> Option<Order> {
        self.pending().next().map(Order::Signal)
    }

    fn tell(&mut self, _: News<'_>) {}
}
