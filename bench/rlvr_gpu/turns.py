"""An environment that talks, for run.py: whatever the model writes, it says `WORDS` words more. Random weights end no turn, so
that a text does, which a word in 20 has.

    run.py FOLDER --skip-peer --set pipeline.rlvr.rollout.max_new_tokens=768 'pipeline.rlvr.rollout.stop=["77"]' \\
        'pipeline.rlvr.reward=[{environment: {}}]' \\
        'pipeline.rlvr.rollout.environment={path: bench/rlvr_gpu/turns.py, class: Talk, max_turns: 4, max_turn_tokens: 128}'
"""

WORDS = 64


class Talk:
    def reset(self, prompt):
        self.words = " ".join(prompt.split()[:WORDS])

    def step(self, text):
        return {"observation": " " + self.words}
