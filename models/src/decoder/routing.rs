//! A layer's routing in a training batch: the experts that are given, and the sums over its router.

use anyroll_backends::ops::Choice;
use tch::Tensor;

use crate::Result;
use crate::router::RouterWatch;

/// Routing of a layer's experts for a batch; by default the layer's own router's, which nobody watches.
#[derive(Debug, Default)]
pub(super) struct LayerRouting<'a> {
    /// Index among the layers with experts.
    index: usize,
    /// Experts of each row, int16 `[N, J]`; a row of -1 has those of the router.
    given: Option<Tensor>,
    watch: Option<&'a RouterWatch>,
}

impl<'a> LayerRouting<'a> {
    /// Takes the part of the `index`-th layer with experts of `routes`, int16 `[N, layers, J]`.
    pub fn new(
        index: usize,
        routes: Option<&Tensor>,
        watch: Option<&'a RouterWatch>,
    ) -> Result<LayerRouting<'a>> {
        let given = routes.map(|routes| routes.f_select(1, index as i64)).transpose()?;
        Ok(LayerRouting { index, given, watch })
    }

    /// Turns the router's `own` choice into the one that counts.
    pub fn of(&self, own: Choice) -> Result<Choice> {
        let chosen = own.chosen.shallow_clone();
        let choice = match &self.given {
            Some(given) => own.replayed(given)?,
            None => own,
        };
        if let Some(watch) = self.watch {
            watch.see(self.index, &chosen, &choice, self.given.as_ref())?;
        }
        Ok(choice)
    }

    /// Adds the gradient of the batch's balancing loss, if it has one, to that of the router's logits.
    pub fn balanced(&self, choice: &Choice, mut dlogits: Tensor) -> Result<Tensor> {
        if let Some(watch) = self.watch {
            watch.add_gradient_(choice, &mut dlogits)?;
        }
        Ok(dlogits)
    }
}
