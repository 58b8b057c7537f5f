"""Guess a number: an environment of several turns."""

import re


class Guess:
    """One game. A turn's first number is the guess, and the model is told on which side of it the number lies."""

    def reset(self, answer):
        self.number = int(answer)

    def step(self, text):
        found = re.search(r"\d+", text)
        if not found:
            return {"done": True, "reward": 0.0}
        guess = int(found[0])
        if guess == self.number:
            return {"done": True, "reward": 1.0}
        return {"observation": self.hint(guess)}

    def hint(self, guess):
        return f"My number is {'larger' if self.number > guess else 'smaller'} than {guess}."


class Mute(Guess):
    """The control: it tells nothing of the number's place."""

    def hint(self, guess):
        return f"My number is not {guess}."
