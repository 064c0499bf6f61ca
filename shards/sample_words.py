"""The words of the sample library (sample_library.py).

The pools are small and the words plain on purpose: each word is one token of a vocabulary of 1024 pieces, and is seen often
enough for a small model to learn within minutes.
"""

from __future__ import annotations

THINGS = {  # deed -> the things it may be done to; the deed alone must say what kind of thing follows
    "ate": "bacon bread cheese ham honey mutton pie plums porridge soup toast trout",
    "built": "arches barns boats bridges huts kilns mills ovens sheds stairs towers walls",
    "burned": "alder ash beech birch cedar elm hazel maple oak peat pine willow",
    "caught": "bees crabs eels flies hares herring mice moths pike salmon shrimps toads",
    "drank": "ale beer brandy broth cider cocoa mead milk perry tea water wine",
    "feared": "dogs fog frost ghosts hail ice mist rain snow storms thunder wolves",
    "fed": "bulls calves colts ducks geese goats hens horses lambs mules oxen pigs",
    "grew": "barley beans carrots corn hemp hops leeks lettuce oats onions peas turnips",
    "heard": "bells crows cuckoos gulls herons larks magpies owls robins rooks thrushes wrens",
    "mended": "boots carts chairs clocks fences gates hats nets roofs saddles tools wheels",
    "picked": "asters clover daisies fern iris ivy lilies mallow poppies roses thistles violets",
    "played": "bowls cards chess darts dice dominoes draughts drums flutes marbles quoits whist",
    "reached": "Alton Ashby Barton Corby Denby Fenton Hadley Linton Malton Norby Oakley Selby",
    "read": "fables letters maps news novels plays poems psalms riddles sermons tales verses",
    "sold": "baskets brooms buttons candles chalk needles nails pots ribbons ropes salt spices",
    "wore": "cotton felt flannel fur lace leather linen satin silk straw tweed wool",
}

NAMES = "Ada Anna Basil Bram Clara Dora Edgar Flora Giles Hugh Jane Lucy Mara Nora Ruth Tom"
SURNAMES = "Barrow Blake Cobb Crane Drake Frost Hale Holt Knox Marsh Penn Reed Shaw Thorn Vane Webb"
HOMES = "Bristol Cromer Dover Dunwick Exeter Harwich Oxford Poole Romney Rye Wells Whitby"
MATERIALS = "amber brass bronze copper crystal golden iron ivory oaken pewter silver velvet"
TREASURES = "bowl box candle coin comb cup key knife lantern locket ring spoon"

TIMES = ("In the morning", "At noon", "After that", "Before dark", "In the evening", "The next day", "Later")
PAUSES = ("Nobody spoke for a while.", "The road was long and white.", "So the day went by.", "It was very quiet.")
