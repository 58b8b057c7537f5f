"""Guess a digit: an environment for `configs/rlvr_guess_cpu.yaml`."""


class Guess:
    """One game. The model writes a digit, and is told whether the one it looks for is higher, `>`, or lower, `<`."""

    def reset(self, answer):
        """Begins with what the record says: a parameter for each column that it wants. May return a first observation."""
        self.digit = answer

    def step(self, text):
        """What the model's turn comes to."""
        if text == self.digit:
            return {"done": True, "reward": 1.0}
        if len(text) != 1 or not text.isdigit():
            return {"done": True, "reward": 0.0}
        return {"observation": ">" if self.digit > text else "<"}


class Mute(Guess):
    """The control: it does not tell where to look."""

    def step(self, text):
        said = super().step(text)
        return said if said.get("done") else {"observation": "<"}
