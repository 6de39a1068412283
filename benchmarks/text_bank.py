"""Makes the bank of texts that comes with `mass interpret`: `python benchmarks/text_bank.py` writes it anew.

Short general descriptions of pictures and of texts, put together from the word lists below. Every word of a list is used,
with frames in turn, so that no frame and no subject fills the bank; a seed decides what goes with what.
"""

from __future__ import annotations

import random
from pathlib import Path

OUT = Path(__file__).parents[1] / "src" / "massmerge" / "interpret" / "bank.txt"
MOST_BYTES = 200_000


def words(text: str) -> list[str]:
    """A list that is written with commas."""
    return [" ".join(word.split()) for word in text.split(",") if word.strip()]


THINGS = words(
    """
    car, bus, lorry, bicycle, motorcycle, train, tram, aeroplane, helicopter, sailing boat, ferry, tractor,
    ambulance, fire engine, taxi, van, racing car, sports car, convertible, pick-up truck, wheel, engine, dashboard,
    road sign, traffic light, bridge, tunnel, chair, table, sofa, bed, lamp, cupboard, bookshelf, mirror, carpet,
    curtain, door, window, staircase, kitchen, bathroom, bottle, cup, plate, spoon, knife, fork, pan, kettle, oven,
    refrigerator, washing machine, vacuum cleaner, microwave, toaster, coffee machine, telephone, mobile phone,
    laptop, keyboard, computer screen, tablet, printer, camera, television, loudspeaker, headphones, microphone,
    radio, game controller, memory card, battery, charger, cable, watch, ring, necklace, handbag, backpack,
    suitcase, umbrella, shirt, dress, coat, trousers, shoes, boots, sandals, hat, scarf, gloves, guitar, piano,
    violin, drum, trumpet, flute, football, tennis racket, basketball, golf club, ski, surfboard, tent, hammer,
    screwdriver, saw, ladder, rope, bucket, brick, pipe, nail, book, newspaper, letter, map, pencil, paintbrush,
    toy, doll, puzzle, coin, banknote, key, lock, clock, candle, box, basket, barrel, bell, flag, statue, fountain,
    fence, bench, bin, mailbox
    """
)
ANIMALS = words(
    """
    dog, puppy, cat, kitten, horse, cow, sheep, goat, pig, donkey, rabbit, mouse, squirrel, hedgehog, fox, wolf,
    bear, deer, lion, tiger, elephant, giraffe, zebra, monkey, kangaroo, camel, whale, dolphin, seal, penguin, duck,
    swan, goose, hen, owl, eagle, parrot, sparrow, crow, frog, toad, snake, lizard, turtle, crocodile, fish, shark,
    crab, snail, spider, bee, butterfly, beetle, ant, worm
    """
)
PLANTS = words(
    """
    rose, tulip, sunflower, daisy, orchid, lily, poppy, dandelion, oak, pine tree, birch, palm tree, willow, cactus,
    fern, moss, mushroom, ivy, grass, wheat, maize, rice field, vineyard, apple tree, hedge, leaf with spots, bark
    of a tree, seedling
    """
)
FOOD = words(
    """
    bread, cheese, butter, egg, soup, salad, pasta, pizza, rice, curry, steak, sausage, roast chicken, fried fish,
    sushi, burger, sandwich, pancake, cake, biscuit, ice cream, chocolate, apple, banana, orange, lemon, grape,
    strawberry, pineapple, melon, tomato, potato, carrot, onion, garlic, cabbage, beans, coffee, tea, beer, red
    wine, orange juice, milk, honey, sugar, pepper
    """
)
PLACES = words(
    """
    beach, island, mountain, valley, river, lake, waterfall, forest, jungle, desert, glacier, volcano, cave, meadow,
    swamp, harbour, lighthouse, village, old town, city at night, skyline, market, shopping street, car park,
    motorway, railway station, airport, runway, factory, power station, warehouse, farm, barn, greenhouse, golf
    course, stadium, swimming pool, playground, park, cemetery, church, mosque, temple, castle, palace, museum,
    library, school, classroom, university, hospital, operating theatre, laboratory, office, bank, court, prison,
    restaurant, bar, hotel, theatre, cinema, concert hall, gym, garden, balcony, attic, cellar, street in the rain,
    snow-covered road, building site, mine, oil rig, solar park, wind farm, flooded street, burnt forest, earthquake
    ruins
    """
)
PEOPLE = words(
    """
    baby, child, schoolgirl, teenager, young man, young woman, old man, old woman, couple, family, crowd, team,
    queue, farmer, baker, cook, waiter, nurse, doctor, surgeon, patient, teacher, pupil, student, professor,
    scientist, engineer, mechanic, builder, carpenter, painter, musician, singer, dancer, actor, writer, journalist,
    photographer, lawyer, judge, police officer, soldier, firefighter, sailor, pilot, driver, cyclist, runner,
    swimmer, football player, goalkeeper, boxer, chess player, priest, monk, politician, president, king, queen,
    banker, shopkeeper, cleaner, beggar, prisoner, tourist, neighbour, stranger
    """
)
FEELINGS = words(
    """
    joy, happiness, delight, love, tenderness, gratitude, pride, hope, relief, calm, surprise, curiosity, boredom,
    doubt, worry, fear, panic, shame, guilt, envy, jealousy, disgust, anger, rage, hatred, contempt, sadness, grief,
    loneliness, despair, disappointment, regret, nostalgia, confusion, impatience, sarcasm, admiration, enthusiasm
    """
)
TOPICS = words(
    """
    a general election, a vote in parliament, a new law, a court ruling, taxes, inflation, unemployment, interest
    rates, the stock market, a merger of two companies, a bankruptcy, a trade agreement, a strike, house prices, a
    bank account, a loan, insurance, a pension, a war, a ceasefire, refugees, a terrorist attack, an arrest, a
    murder trial, corruption, fraud, human rights, freedom of speech, immigration, gun laws, climate change, air
    pollution, recycling, renewable energy, nuclear power, an oil spill, a drought, a flood, a hurricane, an
    earthquake, a wildfire, a landslide, a train crash, a plane crash, a bomb scare, a rescue, emergency aid, food
    shortage, clean drinking water, medical supplies, a vaccine, an epidemic, cancer research, mental health, a
    diet, pregnancy, back pain, a headache, a heart attack, blood pressure, surgery, dentistry, sleep, a football
    match, a hockey game, a baseball season, a tennis final, the Olympic games, a cycling race, a boxing match, a
    transfer of a player, a motorcycle repair, a used car for sale, car insurance, a recipe, a restaurant visit, a
    holiday trip, a hotel booking, a train timetable, the weather forecast, a birthday party, a wedding, a funeral,
    a love affair, a divorce, raising children, school homework, an exam, a university course, a job interview, a
    salary, an office meeting, a project deadline, a film plot, an actor's performance, a disappointing film, a
    brilliant film, a horror film, a comedy, a documentary, a novel, a poem, a play, an art exhibition, a concert,
    an album, a video game, a television series, a celebrity, gossip, fashion, the church, the Bible, Jesus, God,
    Islam, atheism, prayer, philosophy, ethics, history, archaeology, the Middle East, Russia, China, Africa, Latin
    America, the European Union, the United Nations, mathematics, statistics, physics, chemistry, astronomy, a space
    mission, a rocket launch, biology, evolution, genetics, geology, a computer virus, encryption, a password,
    computer graphics, an operating system, a window manager, a hard disk, a graphics card, a printer driver, an
    electronic circuit, software installation, a programming error, a database, machine learning, artificial
    intelligence, the internet, an online shop, a parcel delivery, a refund, customer service, a product review, a
    discount, a subscription, a lottery win, a free prize, a ring tone, a phone contract, a text message, a missed
    call, an appointment, a dinner invitation, a lift home, weekend plans
    """
)
KINDS = words(
    """
    an advertisement, an insult, a threat, a joke, a compliment, an apology, a complaint, a question, an answer, a
    definition, a dictionary entry, a headline, a news report, an editorial, a press release, a scientific abstract,
    a legal contract, a recipe, an instruction manual, a product name, a technical specification, a price list, a
    film review, a diary entry, a private message, a chat between friends, a cry for help, a warning, a greeting, a
    farewell, a thank-you note, a rumour, a political speech, a sermon, a poem, a song text, a list of names, a
    date, an address, a phone number, a web link, a quotation, a forum post, a reply to an earlier message, an edit
    summary, swearing, slang, abbreviations, capital letters, broken English, formal language
    """
)
ASKED = words(
    """
    who did something, who invented something, the name of a person, what year it was, on what date, how many there
    are, how much it costs, how far it is, how long it takes, how old someone is, what percentage, where a place is,
    which country, which city, which river, the capital of a country, what a word means, what an abbreviation stands
    for, why something happens, how something works, how to do something, which animal, which colour, which sport,
    which food, which book, which film, which language, which disease
    """
)
SENSES = words(
    """
    a part of the body, an illness, an act, a quality, a feeling, a thought, a way of speaking, a group of people, a
    family of plants, a genus of animals, a chemical element, a mineral, a liquid, a gas, a tool, a weapon, a
    garment, a building, a vehicle, a musical instrument, a kind of dish, a drink, a shape, a line, a colour, a
    sound, a smell, a number, an amount of money, a unit of measurement, a period of time, a season, a direction, a
    position, an event, a contest, a ceremony, a process, a change, a cause, a reason, a motive, a right, a duty, a
    possession, a loss, a relation, a state of matter, a state of mind, a natural force, a storm, a region, a river,
    a mountain range, a person who teaches, a person who rules, a person who travels, a very small amount, a large
    number, a mistake, a plan, a rule, a belief, a science, an art
    """
)
LOOKS = words(
    """
    striped, dotted, chequered, woven, knitted, braided, wrinkled, cracked, peeling, rusty, scratched, polished,
    shiny, matt, transparent, frosted, bubbly, porous, grainy, sandy, muddy, mossy, hairy, feathery, scaly, spiky,
    smooth, rough, wavy, zigzag, spiral, marbled, blotchy, stained, lace-like, honeycombed, meshed, crystalline,
    metallic, wooden, stony, leathery, silky, paper-thin
    """
)
COLOURS = words(
    "red, orange, yellow, green, blue, violet, pink, brown, black, white, grey, golden, silver, turquoise, beige, pale, dark"
)
STYLES = words(
    """
    photo, close-up, drawing, sketch, oil painting, black-and-white photo, blurred picture, aerial view, satellite
    picture, microscope picture, X-ray, scan, thermal picture, diagram, chart, icon, cartoon, poster, screenshot,
    night photo, underwater photo
    """
)
SIGNS = [
    *(f"{kind} {digit}" for digit in ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
      for kind in ("the handwritten digit", "a house with the number", "the printed number")),
    *(f"the letter {letter}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
]  # fmt: skip


def framed(subjects: list[str], frames: list[str], times: int, chance: random.Random) -> list[str]:
    """Every subject in some of the frames, so that all frames are used alike; `{ax}` is the subject with its article."""
    texts = []
    for number, subject in enumerate(subjects):
        start = chance.randrange(len(frames))
        for turn in range(times):
            frame = frames[(start + number + turn) % len(frames)]
            others = {"colour": COLOURS, "look": LOOKS, "style": STYLES}
            drawn = {name: chance.choice(several) for name, several in others.items()}
            texts.append(frame.format(x=subject, ax=with_article(subject), **drawn))
    return texts


def with_article(noun: str) -> str:
    """`a car`, `an egg`; none for plurals."""
    if noun.endswith("s") and not noun.endswith(("ss", "us")):
        return noun
    return f"{'an' if noun[0] in 'aeiouAEIOUX' and not noun.startswith('uni') else 'a'} {noun}"


FRAMES: list[tuple[list[str], int, list[str]]] = [
    (THINGS, 4, ["{style} of {ax}", "the {colour} {x}", "someone with {ax}", "{ax} on a {colour} background", "buying {ax}",
                 "broken {x}", "{ax}"]),
    (ANIMALS, 4, ["{style} of {ax}", "{ax} in the wild", "{ax} asleep", "{ax} running away", "caring for {ax}"]),
    (PLANTS, 3, ["{style} of {ax}", "{x} in spring", "growing {x}", "{colour} {x}"]),
    (FOOD, 3, ["a plate with {x}", "fresh {x}", "{style} of {x}", "a recipe with {x}", "the taste of {x}"]),
    (PLACES, 3, ["{style} of {ax}", "{ax} seen from above", "people at {ax}", "{ax} at dusk", "{ax} without people"]),
    (PEOPLE, 3, ["portrait of {ax}", "{ax} at work", "{ax} who smiles", "{ax} speaking", "a story about {ax}"]),
    (FEELINGS, 3, ["a face that shows {x}", "words full of {x}", "{x}", "a message of {x}"]),
    (TOPICS, 4, ["a text about {x}", "news about {x}", "a question about {x}", "an opinion on {x}", "a message about {x}"]),
    (KINDS, 3, ["{x}", "{x}, written in a hurry", "{x} that someone wrote online", "{x} from long ago"]),
    (ASKED, 3, ["a question that asks {x}", "asking {x}", "telling {x}"]),
    (SENSES, 3, ["{x}", "a word for {x}", "something that has to do with {x}"]),
    (LOOKS, 3, ["{ax} surface", "close-up of {ax} texture", "{colour} {x} material", "{ax} pattern"]),
    (COLOURS, 4, ["mostly {x}", "{ax} sky", "{x} light", "a plain {x} square"]),
    (STYLES, 3, ["{ax}", "a bad {x}", "{ax} that was made long ago"]),
]  # fmt: skip


def bank() -> list[str]:
    """All texts, each once."""
    chance = random.Random(0)
    texts = [text for subjects, times, frames in FRAMES for text in framed(subjects, frames, times, chance)]
    return list(dict.fromkeys([*texts, *SIGNS]))


def main() -> None:
    """Write the bank."""
    text = "".join(f"{line}\n" for line in bank())
    assert len(text.encode()) < MOST_BYTES
    OUT.write_text(text, encoding="utf-8")
    print(f"{len(text.splitlines())} texts, {len(text.encode())} bytes in {OUT}")


if __name__ == "__main__":
    main()
