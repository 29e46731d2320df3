#!/usr/bin/env python3
"""Composes the sample that comes with the program: short stories, every sentence of which is this
project's own.

Usage: scripts/sample_stories.py [--seed N] [--stories N] [--check FILE] > FILE

    scripts/sample_stories.py > crates/performer-lm/assets/sample.txt
    scripts/sample_stories.py --check crates/performer-lm/assets/sample.txt

A story is drawn from a grammar: a hero, a home, a wish, an obstacle, a turn and an ending. What
stands in one sentence decides what may stand in others: who is called she stays she, what was lost
is what is found, and the friend who helps is one who can. A thing in a tree is fetched by somebody
who climbs or flies, a thing in a pond by somebody who swims.

Two stories never have the same plan, which is the wish with its object, the obstacle with its
place, the helper and the turn; and they never have more than SHARED sentences in common. So the
program may hold out any tenth of them. What a held-out story does share with the others is the
grammar: its words, the forms of its sentences, and parts of its plan. The stories are easier to
predict than those that people or large models write, and their perplexity is no measure beside
other texts'.

The stories are a function of the seed: of Python's generator only random() is used, whose values
the language promises to keep. --check composes them again and compares. Needs Python 3.11 and
nothing else.
"""

import argparse
import pathlib
import random
import re
import sys

SEPARATOR = "\n<|endoftext|>\n"

# The most sentences that two stories may have in common.
SHARED = 2
# The most words and marks of a story: with these it fits the context of the run on the sample.
LENGTH = 118

SHE = "Ada Clara Daisy Ivy Lily Mina Poppy Rosa".split()
HE = "Ben Finn Hugo Karl Leo Max Oscar Pip".split()

HEROES = "fox mouse rabbit bear cat dog hedgehog squirrel duck goat lamb pig badger otter mole girl boy".split()
NATURES = {
    "small": "did not give up",
    "shy": "was brave this time",
    "curious": "asked how it could be done",
    "cheerful": "began to hum a song",
    "young": "did not want to go home yet",
    "brave": "was not afraid",
    "sleepy": "was wide awake now",
    "clever": "had an idea",
    "quiet": "kept on thinking",
    "kind": "did not get angry",
}
HOMES = [
    "in a hollow tree", "under the old bridge", "beside the mill", "at the edge of the woods", "behind the red barn",
    "on a windy hill", "in a cottage by the sea", "near the stone well", "in a burrow under the roses",
    "at the end of the lane", "in the green valley", "next to the baker's shop",
]
TIMES = [
    "One morning", "One sunny day", "One day in spring", "On a cold winter day", "One windy afternoon",
    "One summer evening", "After breakfast", "On a rainy Sunday", "When the leaves were falling",
]

# Who can do what, and how it is told: before the verb phrase stands the helper's name.
SKILLS = {
    "high": {
        "squirrel": ("climb", "ran up in no time"),
        "crow": ("fly", "spread two black wings and flew up"),
        "cat": ("climb", "climbed up without a sound"),
        "robin": ("fly", "flew up like a little red leaf"),
        "monkey": ("climb", "swung up from branch to branch"),
    },
    "water": {
        "duck": ("swim", "paddled out with quick orange feet"),
        "frog": ("swim", "jumped in with a splash"),
        "otter": ("swim", "dived in and came up again"),
        "beaver": ("swim", "swam out with strong slow strokes"),
        "swan": ("swim", "glided out over the water"),
    },
    "heavy": {
        "bear": ("push hard", "pushed with both big paws"),
        "horse": ("pull hard", "pulled with all four legs"),
        "ox": ("pull hard", "pulled and did not stop"),
        "goat": ("push hard", "lowered two strong horns and pushed"),
        "donkey": ("pull hard", "leaned forward and pulled"),
    },
    "dark": {
        "owl": ("see in the dark", "looked around with big round eyes"),
        "firefly": ("make a light", "shone like a tiny lamp"),
        "bat": ("find the way in the dark", "listened to the walls and flew ahead"),
        "mole": ("find the way in the dark", "felt the way with soft pink paws"),
        "cat": ("see in the dark", "walked ahead with shining green eyes"),
    },
    "narrow": {
        "mouse": ("fit through there", "slipped in as quick as a wink"),
        "ant": ("fit through there", "marched straight in"),
        "lizard": ("fit through there", "wriggled in, tail and all"),
        "weasel": ("fit through there", "crept in on flat paws"),
        "beetle": ("fit through there", "crawled in and hummed a little"),
    },
    "hidden": {
        "dog": ("smell things from far away", "sniffed the ground and ran ahead"),
        "fox": ("smell things from far away", "followed a smell through the grass"),
        "pigeon": ("look from above", "flew one wide circle and looked down"),
        "bee": ("look from above", "buzzed over every bush"),
        "pig": ("smell things from far away", "put a wet nose to the ground"),
    },
}
# A hero who can do it alone needs no helper.
ABLE = {
    "high": {"squirrel", "cat"},
    "water": {"duck", "otter"},
    "heavy": {"bear", "goat"},
    "dark": {"cat", "mole"},
    "narrow": {"mouse"},
    "hidden": {"dog", "fox", "pig"},
}

COLOURS = ["red", "blue", "yellow", "green", "silver", "striped", "new", "old"]

# Things to lose. Where a thing went, by the kind of obstacle; `it` is the thing.
THINGS = [
    "kite", "ball", "hat", "scarf", "toy boat", "drum", "bell", "balloon", "doll", "ring", "key", "book", "letter",
    "button", "ribbon", "feather", "marble", "whistle", "spoon", "star of paper",
]
THING_WISHES = [
    "{Hero} wanted to show {his} {colour} {thing} to Grandmother.",
    "{Hero} had a {colour} {thing} and took it everywhere.",
    "{Hero} wanted to play with {his} {colour} {thing} all day long.",
    "{Hero} loved {his} {colour} {thing} more than anything.",
    "{Hero} got a {colour} {thing} for {his} birthday and wanted to take it to school.",
    "{Hero} had made a {colour} {thing} as a present for Father.",
]
THING_OBSTACLES = {
    "high": ["the top of an oak", "the roof of the barn", "the highest branch of the pear tree", "the church tower"],
    "water": ["the pond", "the river", "the lake", "the mill stream"],
    "heavy": ["a big stone", "a fallen log", "a sack of flour", "an old cart"],
    "dark": ["a dark cave", "the dark cellar", "an empty tunnel", "the old mine"],
    "narrow": ["a crack in the wall", "a hole under the stairs", "a gap between two rocks", "a drain"],
    "hidden": ["the tall grass", "the deep snow", "the corn field", "the fallen leaves"],
}
THING_LOSSES = {
    "high": ["But the wind took the {thing} and carried it up to {place}.", "But it flew up, and now it hung on {place}.",
             "A naughty magpie dropped the {thing} on {place}."],
    "water": ["But the {thing} fell into {place} and floated away.", "Then {he} stumbled, and the {thing} landed in {place}.",
              "A gust of wind blew the {thing} far out over {place}."],
    "heavy": ["But {place} rolled over and the {thing} was stuck under it.", "Then the {thing} slid under {place}.",
              "But {place} tipped over, right on top of the {thing}."],
    "dark": ["But the {thing} rolled into {place}, where nobody could see a thing.",
             "Then it slipped from {his} hands and bounced down into {place}.",
             "But {he} had left the {thing} in {place}, and it was night."],
    "narrow": ["But the {thing} fell into {place}.", "Then the {thing} slipped away into {place}.",
               "{He} let go of it for a moment, and it dropped into {place}."],
    "hidden": ["But the {thing} was gone, lost somewhere in {place}.", "Then {he} dropped the {thing} in {place}.",
               "On the way home the {thing} fell into {place}, and {he} did not notice."],
}
THING_TRIES = {
    "high": ["{He} jumped as high as {he} could, but it was too far up.", "{He} threw a stick at it, and the stick got stuck too.",
             "{He} stood on a bucket, but the bucket was too low."],
    "water": ["{He} reached out with a stick, but the stick was too short.", "{He} could not swim, so {he} stood on the bank and cried.",
              "{He} put one foot in the water and it was icy cold."],
    "heavy": ["{He} pushed until {his} face was red, but nothing moved.", "{He} pulled and pulled, and then {he} fell over.",
              "{He} tried to lift it, but it was much too heavy."],
    "dark": ["{He} took one step inside and ran out again.", "{He} called hello, and only an echo came back.",
             "{He} lit a match, but the wind blew it out."],
    "narrow": ["{His} arm was too short and too thick.", "{He} poked with a twig, and the {thing} fell in deeper.",
               "{He} could see it shine in there, but {he} could not reach it."],
    "hidden": ["{He} looked for it until {his} knees were dirty.", "{He} searched here and there and found only a shoe.",
               "{He} walked up and down three times and saw nothing."],
}
THING_RESULTS = {
    "high": ["{Friend} {act} and threw the {thing} down.", "{Friend} {act} and pulled the {thing} free."],
    "water": ["{Friend} {act} and brought the {thing} back.", "{Friend} {act} and soon the {thing} lay on the bank."],
    "heavy": ["{Friend} {act}, and out came the {thing}.", "{Friend} {act} until the {thing} was free."],
    "dark": ["{Friend} {act}, and there in a corner lay the {thing}.", "{Friend} {act}, and together they found the {thing}."],
    "narrow": ["{Friend} {act} and rolled the {thing} out.", "{Friend} {act} and came back with the {thing}."],
    "hidden": ["{Friend} {act} and stopped right beside the {thing}.", "{Friend} {act}, and there was the {thing}."],
}
THING_JOYS = [
    "The {thing} was a little dirty, but {Hero} did not mind.", "{Hero} held the {thing} tight.",
    "{Hero} hugged the {thing} and then {he} hugged {Friend}.", "Now {Hero} had {his} {colour} {thing} again.",
    "Not even a scratch was on the {thing}.", "{Hero} wiped the {thing} clean and laughed.",
]

# Places to go to, and what there is to do.
GOALS = {
    "the sea": "listened to the waves", "the fair": "rode on the wooden horses", "the lighthouse": "counted the ships",
    "the waterfall": "saw a rainbow", "the island": "had a picnic", "the market": "bought two warm buns",
    "Grandmother's house": "ate soup by the fire", "the top of the hill": "looked at the whole valley",
    "the village dance": "danced until the music stopped", "the castle": "waved to the king",
    "the frozen lake": "slid on the ice", "the apple garden": "picked a basket of apples",
    "the circus": "clapped for the clown", "the harbour": "smelled the salt and the fish",
}
GOAL_WISHES = [
    "{Hero} wanted to go to {goal}.", "{Hero} had dreamed of {goal} all week.", "All {his} life {Hero} had wanted to see {goal}.",
    "{Hero} packed some bread and set out for {goal}.", "{Hero} had promised to be at {goal} before noon.",
    "\"Today I will go to {goal},\" said {Hero}.",
]
GOAL_OBSTACLES = {
    "high": ["a high wall", "a steep cliff", "a fence as tall as a house"],
    "water": ["a wide river", "a flooded meadow", "a deep stream"],
    "heavy": ["a fallen tree", "a huge rock", "a broken wagon"],
    "dark": ["a long dark tunnel", "a forest as black as night", "a cave without a lamp"],
    "narrow": ["a locked gate", "a closed door", "a hedge full of thorns"],
    "hidden": ["thick fog", "a maze of bushes", "fresh snow"],
}
GOAL_LOSSES = {
    "high": ["But {place} stood in the way.", "Soon {he} came to {place} and had to stop."],
    "water": ["But there was {place} and no bridge.", "Then {he} came to {place}, and the ferry was gone."],
    "heavy": ["But {place} lay across the road.", "Around the bend {he} found {place}, and nobody could pass."],
    "dark": ["But the only way led through {place}.", "The road went into {place}, and {he} stopped."],
    "narrow": ["But {place} was in the way, and nobody was home.", "Halfway there {he} stood before {place}."],
    "hidden": ["But {place} covered the path, and {he} was lost.", "Then {place} hid the road, and every way looked the same."],
}
GOAL_TRIES = {
    "high": ["{He} tried to climb it and slid down again.", "{He} looked up until {his} neck hurt."],
    "water": ["{He} looked for stones to step on, but there were none.", "{He} got wet feet and went back."],
    "heavy": ["{He} kicked it, and only {his} toe hurt.", "{He} pushed with all {his} strength, but it did not move."],
    "dark": ["{He} heard a strange noise and ran back.", "{His} legs shook, and {he} sat down on a stone."],
    "narrow": ["{He} knocked and called, and nobody came.", "{He} looked for the key under every stone."],
    "hidden": ["{He} went left, then right, and came back to the same tree.", "{He} walked in a circle for an hour."],
}
GOAL_RESULTS = {
    "high": ["{Friend} {act} and let down a rope, and {Hero} held on to it.", "{Friend} {act}, tied a rope to a tree, and {Hero} followed."],
    "water": ["{Friend} {act}, found an old boat, and pulled {Hero} across.", "{Friend} {act}, and {Hero} came along on a plank."],
    "heavy": ["{Friend} {act} until there was room to pass.", "{Friend} {act}, and the road was free."],
    "dark": ["{Friend} {act}, and {Hero} stayed close behind.", "{Friend} {act}, and at last {Hero} saw daylight."],
    "narrow": ["{Friend} {act} and opened it from the other side for {Hero}.", "{Friend} {act}, found the key, and let {Hero} in."],
    "hidden": ["{Friend} {act}, and behind the next bush was the road.", "{Friend} {act} and showed {Hero} the way."],
}
GOAL_JOYS = [
    "At {goal} {Hero} and {Friend} {deed}.", "They reached {goal} before dark and {deed}.",
    "At last they came to {goal}, and there they {deed}.", "{Hero} took {Friend} along to {goal}, where they {deed}.",
]

# Things to make, each of something that must be fetched.
DISHES = {
    "berry pie": "berries", "honey cake": "honey", "apple cake": "apples", "nut loaf": "nuts", "mushroom pie": "mushrooms",
    "pumpkin pie": "pumpkins", "flower crown": "daisies", "raft": "wooden boards", "warm nest": "soft moss",
    "snow lantern": "candles", "swing": "ropes", "scarecrow": "straw", "birdhouse": "nails", "rainbow picture": "paint",
}
# What these are made of is no plural.
UNCOUNTED = {"honey cake", "warm nest", "scarecrow", "rainbow picture"}
DISH_WISHES = [
    "{Hero} wanted to make {dish} for Mother.", "\"I will make {dish},\" said {Hero}, \"the best of all.\"",
    "{Hero} had promised {his} sister {dish}.", "Everybody in the village made something for the feast, and {Hero} chose {dish}.",
    "{Hero} was alone and wanted to make {dish}.", "It was {his} turn to make {dish}, and {Hero} was excited.",
]
DISH_OBSTACLES = {
    "high": ["on the highest shelf", "on top of the cupboard", "up in the attic without a ladder"],
    "water": ["on the other side of the brook", "on a tiny island", "on a raft in the middle of the pond"],
    "heavy": ["under a heavy lid", "behind a big barrel", "in a chest with a stone on top"],
    "dark": ["at the back of a dark cave", "in the cellar without a lamp", "in the darkest part of the wood"],
    "narrow": ["behind a hole in the fence", "inside a hollow log", "at the end of a narrow pipe"],
    "hidden": ["somewhere in the meadow", "in a secret place", "under the snow"],
}
DISH_LOSSES = ["For that {he} needed {stuff}, but all the {stuff} {be} {place}.", "{He} needed {stuff}, and the {stuff} {be} {place}.",
               "But the {stuff} that {he} needed {be} {place}."]
DISH_TRIES = {
    "high": ["{He} climbed on a chair and fell on {his} back.", "{He} stretched and stretched, but it was too high."],
    "water": ["{He} threw a string across, and it fell into the water.", "{He} waited for a boat, and no boat came."],
    "heavy": ["{He} tried with both hands, and it did not move at all.", "{He} pushed, and {his} feet slid back."],
    "dark": ["{He} went in and bumped {his} nose.", "{He} counted to ten, but {he} was still afraid."],
    "narrow": ["{He} got stuck and had to pull {his} head out again.", "{He} was too big by far."],
    "hidden": ["{He} dug a hole here and a hole there, and found only stones.", "{He} asked the wind, and the wind did not know."],
}
DISH_RESULTS = {
    "high": ["{Friend} {act} and handed down the {stuff}.", "{Friend} {act}, and down came the {stuff}."],
    "water": ["{Friend} {act} and came back with the {stuff}.", "{Friend} {act} and brought the {stuff}, only a little wet."],
    "heavy": ["{Friend} {act}, and then {Hero} could take the {stuff}.", "{Friend} {act}, and behind it they found the {stuff}."],
    "dark": ["{Friend} {act}, and soon they carried the {stuff} home.", "{Friend} {act}, and {Hero} found the {stuff}."],
    "narrow": ["{Friend} {act} and passed the {stuff} out to {Hero}.", "{Friend} {act} and came out with the {stuff}."],
    "hidden": ["{Friend} {act} and soon found the {stuff}.", "{Friend} {act}, and {Hero} gathered the {stuff}."],
}
DISH_JOYS = [
    "In the evening {the_dish} was ready, and it was wonderful.", "{Hero} went home and made {dish}, and {Friend} helped.",
    "When {the_dish} was finished, {Hero} showed it to {Friend} first.", "So {the_dish} was made after all, and nobody had seen a better one.",
]

# Things to learn, with somebody who can.
LESSONS = {
    "swim": ("duck frog otter swan", "swam all the way across the pond"),
    "sing": ("robin frog swan crow", "sang so well that the birds were silent"),
    "dance": ("goat horse cat bee", "danced around the fountain"),
    "whistle": ("robin donkey fox owl", "whistled a song from start to end"),
    "skate": ("fox pig dog bear", "skated in a perfect circle"),
    "count to a hundred": ("owl crow ant mouse", "counted a hundred stars"),
    "read": ("owl mole mouse bear", "read a whole page aloud"),
    "stand on one leg": ("swan crow cat horse", "stood on one leg like a flower"),
    "climb": ("squirrel cat monkey goat", "climbed to the top of the apple tree"),
    "juggle": ("monkey otter bear beaver", "juggled three plums"),
    "knit": ("mouse lizard beaver cat", "knitted a sock without a hole"),
    "bake": ("pig bear mouse donkey", "baked a round brown loaf"),
}
KNOWS = {"duck": {"swim"}, "otter": {"swim", "juggle"}, "squirrel": {"climb"}, "cat": {"climb"}, "goat": {"climb"}}
LESSON_WISHES = [
    "{Hero} wanted to learn to {lesson}.", "Everyone could {lesson}, only {Hero} could not.",
    "More than anything {Hero} wished to {lesson}.", "\"I will learn to {lesson} before winter,\" said {Hero}.",
]
LESSON_OBSTACLES = {
    "laughed": ["But when {he} tried, the others laughed.", "But the geese laughed at {him}, and {he} ran away."],
    "fell": ["But the first time {he} fell and hurt {his} knee.", "But {he} fell down, and then {he} fell down again."],
    "afraid": ["But {he} was afraid and hid behind a tree.", "But {his} heart beat so fast that {he} could not begin."],
    "forgot": ["But {he} always forgot what came next.", "But what {he} learned in the morning {he} had forgotten by noon."],
}
LESSON_TRIES = ["{He} wanted to give up.", "{He} sat down on a stump and sighed.", "{He} thought it would never work.",
                "{He} went home with {his} head low."]
LESSON_RESULTS = {
    "laughed": ["{Friend} took {him} to a place where nobody could see them.", "{Friend} told the others to be quiet and held {his} hand."],
    "fell": ["{Friend} put soft hay on the ground and said, \"Once more.\"", "{Friend} showed {him} how to fall without getting hurt."],
    "afraid": ["{Friend} stayed beside {him} and counted to three.", "{Friend} said, \"I was afraid too when I was small.\""],
    "forgot": ["{Friend} made a rhyme of it, and a rhyme is easy to remember.", "{Friend} did it slowly, and {Hero} did it after {friend_him}."],
}
LESSON_JOYS = ["They practised every day, and at last {Hero} {feat}.", "A week later {Hero} {feat}, and {Friend} cheered.",
               "On the seventh day {Hero} {feat}.", "Then, all of a sudden, {Hero} {feat}."]

OPENINGS = [
    "Once upon a time there was a {nature} {kind} named {Hero} who lived {home}.",
    "Once upon a time a {nature} {kind} named {Hero} lived {home}.",
    "Once upon a time, {home}, there lived a {nature} {kind}. {His} name was {Hero}.",
    "There was a {nature} {kind} named {Hero}. {He} lived {home}.",
    "{Hero} was a {nature} {kind} who lived {home}.",
    "A {nature} {kind} lived {home}. {His} name was {Hero}.",
]
# The first three begin three of five stories: the words that `generate` begins with.
OPENING_SHARE = 0.6

MEETINGS = {
    "asks": [
        "{He} went to {Friend} the {helper} and asked for help.", "So {he} asked {Friend} the {helper}, \"Can you {skill}?\"",
        "\"Please help me,\" {he} said to a {helper} named {Friend}.", "{He} knocked at the door of {Friend} the {helper}.",
    ],
    "offers": [
        "A {helper} named {Friend} came by and asked, \"Why are you so sad?\"", "Just then {Friend} the {helper} came along the path.",
        "{Friend} the {helper} had seen it all from a bench.", "\"Can I help you?\" said a {helper}. It was {Friend}.",
    ],
    "trade": [
        "There sat {Friend}, a hungry {helper}, and {Hero} gave {friend_him} {gift}.",
        "On the way {he} met {Friend} the {helper}, who was hungry, and shared {gift} with {friend_him}.",
        "A {helper} named {Friend} was cold, so {Hero} lent {friend_him} a coat.",
        "\"I am so hungry,\" said {Friend} the {helper}, and {Hero} gave {friend_him} {gift}.",
    ],
    "refuses": [
        "The goose said, \"I have no time.\" But {Friend} the {helper} stopped.",
        "{He} asked the proud peacock, who only laughed. {Friend} the {helper} did not laugh.",
        "The turtle was asleep and the hen was busy, but {Friend} the {helper} listened.",
        "First {he} asked a snail, who was too slow. Then {he} asked {Friend}, who was a {helper}.",
    ],
}
ANSWERS = {
    "asks": ["\"Of course,\" said {Friend}. \"I can {skill}.\"", "\"That is easy for me,\" said {Friend}. \"I can {skill}.\"",
             "{Friend} smiled and said, \"I can {skill}.\"", "\"Yes,\" said {Friend}, \"let us go at once.\""],
    "offers": ["{Hero} told {friend_him} everything. \"I can {skill},\" said {Friend}.", "\"Do not cry,\" said {Friend}. \"I can {skill}.\"",
               "\"You are lucky,\" said {Friend}. \"I can {skill}.\"", "\"Two are better than one,\" said {Friend}."],
    "trade": ["\"You are kind,\" said {Friend}. \"Now I will help you. I can {skill}.\"", "\"Thank you,\" said {Friend}. \"And what do you need?\"",
              "\"I will not forget that,\" said {Friend}, and {friend_he} kept the promise.", "\"Now it is my turn to help,\" said {Friend}."],
    "refuses": ["\"I have time for you,\" said {Friend}. \"I can {skill}.\"", "\"Come,\" said {Friend}, \"I can {skill}.\"",
                "\"Everyone needs help sometimes,\" said {Friend}.", "\"Show me where,\" said {Friend}, \"for I can {skill}.\""],
}
GIFTS = ["a red apple", "half of {his} bread", "a bag of nuts", "a piece of cheese", "some sweet berries", "a warm pie", "a big carrot"]
ENDINGS = [
    "{Hero} thanked {Friend} and gave {friend_him} {gift}.", "From that day on {Hero} and {Friend} were best friends.",
    "That night {Hero} slept well and dreamed of {Friend}.", "\"Thank you, {Friend},\" said {Hero}. \"You are a good friend.\"",
    "{Hero} learned that it is good to ask for help.", "And when {Friend} needed help one day, {Hero} came at once.",
    "{Friend} waved and went home, and {Hero} waved back until {friend_he} was gone.", "They shared {gift} and watched the moon come up.",
    "Mother was proud of {Hero}, and {Friend} stayed for supper.", "{Hero} told everyone what {Friend} had done.",
    "They laughed all the way home, the {kind} and the {helper}.", "\"Come again tomorrow,\" said {Friend}, and {Hero} did.",
]


class Composer:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def pick(self, items):
        items = list(items)
        return items[int(self.random.random() * len(items))]

    def chance(self, share):
        return self.random.random() < share

    def story(self):
        """A plan and the sentences of its story."""
        turn = self.pick(MEETINGS)
        matter = self.pick(["thing", "thing", "goal", "goal", "dish", "dish", "lesson"])
        words = {}
        if matter == "lesson":
            lesson = self.pick(LESSONS)
            helpers, feat = LESSONS[lesson]
            obstacle = place = self.pick(LESSON_OBSTACLES)
            helper = self.pick(helpers.split())
            heroes = [kind for kind in HEROES if lesson not in KNOWS.get(kind, ())]
            words |= {"lesson": lesson, "feat": feat, "skill": f"teach you to {lesson}"}
            about = lesson
            wishes, losses, tries = LESSON_WISHES, LESSON_OBSTACLES[obstacle], LESSON_TRIES
            results, joys = LESSON_RESULTS[obstacle], LESSON_JOYS
        else:
            obstacle = self.pick(SKILLS)
            helper = self.pick(SKILLS[obstacle])
            words["skill"], words["act"] = SKILLS[obstacle][helper]
            heroes = [kind for kind in HEROES if kind not in ABLE[obstacle]]
            if matter == "thing":
                about = words["thing"] = self.pick(THINGS)
                words["colour"] = self.pick(COLOURS)
                wishes, losses, tries = THING_WISHES, THING_LOSSES[obstacle], THING_TRIES[obstacle]
                places, results, joys = THING_OBSTACLES, THING_RESULTS[obstacle], THING_JOYS
            elif matter == "goal":
                about = words["goal"] = self.pick(GOALS)
                words["deed"] = GOALS[about]
                wishes, losses, tries = GOAL_WISHES, GOAL_LOSSES[obstacle], GOAL_TRIES[obstacle]
                places, results, joys = GOAL_OBSTACLES, GOAL_RESULTS[obstacle], GOAL_JOYS
            else:
                about = self.pick(DISHES)
                words |= {"dish": f"a {about}", "the_dish": f"the {about}", "stuff": DISHES[about]}
                words["be"] = "was" if about in UNCOUNTED else "were"
                wishes, losses, tries = DISH_WISHES, DISH_LOSSES, DISH_TRIES[obstacle]
                places, results, joys = DISH_OBSTACLES, DISH_RESULTS[obstacle], DISH_JOYS
            place = words["place"] = self.pick(places[obstacle])

        kind = self.pick(kind for kind in heroes if kind != helper)
        hero = self.pick(SHE if kind == "girl" or kind != "boy" and self.chance(0.5) else HE)
        friend = self.pick(name for name in SHE + HE if name != hero)
        she, friend_she = hero in SHE, friend in SHE
        words |= {
            "Hero": hero, "kind": kind, "nature": self.pick(NATURES), "home": self.pick(HOMES),
            "he": "she" if she else "he", "him": "her" if she else "him", "his": "her" if she else "his",
            "Friend": friend, "helper": helper, "friend_he": "she" if friend_she else "he",
            "friend_him": "her" if friend_she else "him",
        }
        words |= {"He": words["he"].capitalize(), "His": words["his"].capitalize()}
        gift = self.pick(GIFTS).format(**words)
        words["gift"] = gift

        opening = self.pick(OPENINGS[:3] if self.chance(OPENING_SHARE) else OPENINGS[3:])
        forms = [opening, self.wish(wishes), self.pick(losses)]
        if turn != "trade":
            forms.append(self.pick(tries))
            if self.chance(0.25):
                forms.append("But {Hero} " + NATURES[words["nature"]] + ".")
        forms += [self.pick(MEETINGS[turn]), self.pick(ANSWERS[turn]), self.pick(results), self.pick(joys)]
        # Who has been given a coat or a carrot is not given another.
        forms.append(self.pick(form for form in ENDINGS if turn != "trade" or "{gift}" not in form))
        text = " ".join(form.format(**words) for form in forms)
        text = re.sub(r"\ba (?=[aeiou])", "an ", text)
        text = re.sub(r"\bA (?=[aeiou])", "An ", text)
        return (matter, about, obstacle, place, helper, turn), text

    def wish(self, wishes):
        wish = self.pick(wishes)
        if wish.startswith(("{Hero} wanted", "{Hero} packed")) and self.chance(0.6):
            return f"{self.pick(TIMES)} {wish}"
        return wish


def sentences(text):
    return re.split(r"(?<=[.?!\"]) (?=[A-Z\"])", text)


def compose(seed, count):
    composer = Composer(seed)
    plans, holders, stories = set(), {}, []
    while len(stories) < count:
        plan, text = composer.story()
        if plan in plans or len(re.findall(r"[\w']+|[^\w\s]", text)) > LENGTH:
            continue
        own = set(sentences(text))
        shared = {}
        for sentence in own:
            for story in holders.get(sentence, ()):
                shared[story] = shared.get(story, 0) + 1
        if max(shared.values(), default=0) > SHARED:
            continue
        for sentence in own:
            holders.setdefault(sentence, []).append(len(stories))
        plans.add(plan)
        stories.append(text)
    return stories


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stories", type=int, default=2900)
    parser.add_argument("--check", metavar="FILE")
    args = parser.parse_args()
    text = SEPARATOR.join(compose(args.seed, args.stories)) + "\n"
    if args.check is None:
        sys.stdout.write(text)
        return
    try:
        found = pathlib.Path(args.check).read_bytes().decode("utf-8")
    except OSError as error:
        sys.exit(f"cannot read {args.check}: {error.strerror}")
    if found != text:
        sys.exit(f"{args.check} is not what seed {args.seed} gives; write it anew without --check")
    print(f"{args.check}: {args.stories} stories of seed {args.seed}, {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
